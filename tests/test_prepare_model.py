"""Models from every source arrive whole and checked, and nothing damaged is loaded."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save, save_file

from scripts.prepare.model import ModelFilesError, prepare, verify, write_record

ROOT = Path(__file__).parents[1]
NAME, COMMIT = "someone/tiny", "c" * 40
TOKEN = "hf_secretsecretsecret"


class Hub(ThreadingHTTPServer):
    """Plays the hub for one repository; attributes make it misbehave."""

    def __init__(self, files: dict[str, bytes], kind: str = "model"):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.kind = files, kind
        self.served: dict[str, bytes] = {}  # what it sends instead of a file
        self.status: int | None = None  # what it answers instead of the repository
        self.error_code = ""
        self.stop_after: int | None = None  # bytes of a large file after which it falls silent
        self.ranges: list[str | None] = []  # Range headers of the requests for large files
        self.tokens: set[str | None] = set()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # clients that are killed in these tests hang up

    def close(self):
        self.shutdown()
        self.server_close()


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.status:
            return self.answer(hub.status, b"{}", {"X-Error-Code": hub.error_code, "X-Error-Message": "no"})
        api = f"/api/{hub.kind}s/{NAME}"
        if path == f"{api}/revision/{COMMIT}" or path == f"{api}/revision/main" or path == api:
            siblings = [{"rfilename": name, **self.entry(name)} for name in hub.files]
            return self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        if path == f"{api}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "oid": self.entry(name)["blobId"], **self.entry(name)}
                for name in hub.files
            ]
            return self.answer(200, json.dumps(tree).encode())
        if match := re.fullmatch(f"(?:/datasets)?/{NAME}/resolve/{COMMIT}/(.+)", path):
            return self.file(match[1])
        return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if "revision" in path else "RepoNotFound"})

    def entry(self, name):
        content = self.server.files[name]
        entry = {"size": len(content), "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
        if name.endswith((".safetensors", ".parquet")):
            entry["lfs"] = {
                "sha256": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "oid": "",
                "pointerSize": 1,
            }
            entry["lfs"]["oid"] = entry["lfs"]["sha256"]
        return entry

    def file(self, name):
        hub = self.server
        entry, content = self.entry(name), hub.served.get(name, hub.files[name])
        etag = entry["lfs"]["sha256"] if "lfs" in entry else entry["blobId"]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        status, span = 200, self.headers.get("Range")
        if self.command == "GET" and "lfs" in entry:
            hub.ranges.append(span)
        if span:
            start = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        self.answer(status, content, headers, stop_after=hub.stop_after if "lfs" in entry else None)

    def answer(self, status, content, headers=None, stop_after=None):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:stop_after])
            if stop_after and stop_after < len(content):
                time.sleep(8)  # the client is killed meanwhile


def tiny_model(weights: int = 4) -> dict[str, bytes]:
    """The files of a model that is one in form only."""
    return {
        "config.json": json.dumps({"model_type": "qwen3"}).encode(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
        "model.safetensors": save({"weight": numpy.arange(weights, dtype=numpy.float32)}),
    }


@pytest.fixture
def hub():
    hub = Hub({**tiny_model(), "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "README.md": b"hello"})
    yield hub
    hub.close()


def command(tmp_path: Path, endpoint: str, *, wait: bool = True, module: str = "model", **environment: str):
    """Runs the preparation as the pipeline does, with a cache and a home of its own."""
    settings = {"source": "hub", "name": NAME, "revision": environment.pop("revision", COMMIT)}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            f"scripts.prepare.{module}",
            "--settings",
            json.dumps(settings),
            "--out",
            f"{tmp_path}/out",
        ],
        cwd=ROOT,
        env={**inherited, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if not wait:
        return process
    process.stdout_text, process.stderr_text = process.communicate(timeout=60)
    assert "Traceback" not in process.stderr_text, process.stderr_text
    return process


def local_model(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def prepared(tmp_path: Path, files: dict[str, bytes]) -> Path:
    source = local_model(tmp_path / "source", files)
    prepare({"source": "local", "name": str(source), "revision": None}, tmp_path / "out")
    return tmp_path / "out"


# From the hub


def test_a_model_is_downloaded_checked_and_used_again_without_network(hub, tmp_path):
    first = command(tmp_path, hub.url)
    assert first.returncode == 0, first.stderr_text
    out = tmp_path / "out"
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names | {"model.json"}, "no pickle, no other folder"
    record = json.loads((out / "model.json").read_text())
    content = hub.files["model.safetensors"]
    assert record["files"]["model.safetensors"] == {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert (record["source"], record["name"], record["revision"]) == ("hub", NAME, COMMIT)
    assert "4 of 4 files to download" in first.stderr_text
    verify(out)

    hub.close()
    shutil.rmtree(out)
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        again = command(tmp_path, hub.url, **environment)
        assert again.returncode == 0, again.stderr_text
        assert "using the copy in the cache" in again.stderr_text
        verify(out)


def test_a_killed_download_goes_on_where_it_stopped(tmp_path):
    hub = Hub(tiny_model(weights=6_000_000))  # 24 MB
    hub.stop_after = 15_000_000
    process = command(tmp_path, hub.url, wait=False)
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in tmp_path.rglob("*.incomplete")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert not (tmp_path / "out").exists()

    hub.stop_after = None
    again = command(tmp_path, hub.url)
    assert again.returncode == 0, again.stderr_text
    assert hub.ranges[0] is None and int(re.fullmatch(r"bytes=(\d+)-", hub.ranges[-1])[1]) > 1_000_000
    assert "going on after" in again.stderr_text
    verify(tmp_path / "out")
    hub.close()


@pytest.mark.parametrize("weights", [4, 3_000_000], ids=["small", "large"])
def test_a_file_with_another_digest_than_declared_is_refused(tmp_path, weights):
    hub = Hub(tiny_model(weights))
    content = hub.files["model.safetensors"]
    hub.served["model.safetensors"] = content[:-1] + b"X"
    refused = command(tmp_path, hub.url)
    assert refused.returncode == 1
    assert "model.safetensors" in refused.stderr_text and "damaged" in refused.stderr_text
    assert not (tmp_path / "out/model.json").exists()

    hub.served.clear()
    if remedy := re.search(r"^  rm '(.*)'$", refused.stderr_text, re.MULTILINE):
        Path(remedy[1]).unlink()
    assert command(tmp_path, hub.url).returncode == 0, "the way out that the message gives"
    hub.close()


def test_an_unreachable_hub_is_named_with_the_ways_on(tmp_path):
    hub = Hub({})
    hub.close()
    started = time.monotonic()
    failed = command(tmp_path, hub.url)
    assert failed.returncode == 1 and time.monotonic() - started < 15
    for word in (hub.url, NAME, COMMIT, "HTTPS_PROXY", "hf-mirror.com", "modelscope", "local", "scale: demo"):
        assert word in failed.stderr_text
    assert not failed.stdout_text

    offline = command(tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "unset HF_HUB_OFFLINE" in offline.stderr_text and str(tmp_path / "hf") in offline.stderr_text


@pytest.mark.parametrize(
    "status, code, words",
    [
        (401, "GatedRepo", ["permission", "HTTP 401", "HF_TOKEN is set"]),
        (403, "", ["permission", "HTTP 403", "HF_TOKEN is set"]),
        (401, "", ["HTTP 401", "HF_TOKEN is set"]),
        (404, "RepoNotFound", ["HTTP 404", "check model.name"]),
        (404, "RevisionNotFound", ["does not know this revision", "check model.name and model.revision"]),
        (503, "", ["HTTP 503", "HF_ENDPOINT=https://hf-mirror.com"]),
    ],
)
def test_a_refusal_of_the_hub_is_explained_without_the_token(hub, tmp_path, status, code, words):
    hub.status, hub.error_code = status, code
    refused = command(tmp_path, hub.url, HF_TOKEN=TOKEN)
    assert refused.returncode == 1
    for word in words:
        assert word in refused.stderr_text
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in refused.stdout_text + refused.stderr_text


def test_a_gated_model_without_token_asks_for_one(hub, tmp_path):
    hub.status, hub.error_code = 401, "GatedRepo"
    assert "then set HF_TOKEN" in command(tmp_path, hub.url).stderr_text


# From a folder


def test_a_local_model_is_linked_and_recorded(tmp_path):
    out = prepared(tmp_path, tiny_model())
    assert (out / "model.safetensors").is_symlink()
    assert (out / "model.safetensors").resolve() == (tmp_path / "source/model.safetensors").resolve()
    verify(out)
    source = tmp_path / "source"
    prepare({"source": "local", "name": str(source), "revision": None}, out)  # a second time is no fault
    verify(out)


def test_a_path_with_spaces_and_chinese_characters_is_fine(tmp_path):
    (tmp_path / "我的 模型").mkdir()
    verify(prepared(tmp_path / "我的 模型", tiny_model()))


@pytest.mark.parametrize(
    "remove, message",
    [
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "no tokenizer"),
        ("tokenizer_config.json", "tokenizer_config.json is missing"),
        ("model.safetensors", "holds no weights"),
    ],
)
def test_an_incomplete_folder_is_refused_naming_what_it_lacks(tmp_path, remove, message):
    files = tiny_model()
    del files[remove]
    with pytest.raises(ModelFilesError, match=message) as error:
        prepared(tmp_path, files)
    assert str(tmp_path / "source") in str(error.value)
    assert not (tmp_path / "out").exists()


def test_pickled_weights_are_named_and_not_taken(tmp_path):
    files = tiny_model()
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    with pytest.raises(ModelFilesError, match=r"pytorch_model\.bin.*Pickled weights are not read"):
        prepared(tmp_path, files)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path):
    with pytest.raises(ModelFilesError, match="without a chat template"):
        prepared(tmp_path, {**tiny_model(), "tokenizer_config.json": b"{}"})


def test_a_chat_template_in_its_own_file_is_enough(tmp_path):
    verify(
        prepared(tmp_path, {**tiny_model(), "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"})
    )


def test_every_shard_of_a_large_model_must_be_there(tmp_path):
    files = tiny_model()
    shard = files.pop("model.safetensors")
    weight_map = {"weight": "model-00001-of-00002.safetensors", "other": "model-00002-of-00002.safetensors"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["model-00001-of-00002.safetensors"] = shard
    with pytest.raises(ModelFilesError, match=r"model-00002-of-00002\.safetensors is missing"):
        prepared(tmp_path, files)
    (tmp_path / "source/model-00002-of-00002.safetensors").write_bytes(shard)
    with pytest.raises(ModelFilesError, match="lacks other"):
        prepare({"source": "local", "name": str(tmp_path / "source")}, tmp_path / "out")
    save_file({"other": numpy.zeros(1)}, tmp_path / "source/model-00002-of-00002.safetensors")
    prepare({"source": "local", "name": str(tmp_path / "source")}, tmp_path / "out")
    verify(tmp_path / "out")


@pytest.mark.parametrize("cut", [4, 40, -2])
def test_a_half_downloaded_weight_file_is_refused(tmp_path, cut):
    files = tiny_model()
    files["model.safetensors"] = files["model.safetensors"][:cut]
    with pytest.raises(ModelFilesError, match=r"model\.safetensors .* is no whole safetensors file"):
        prepared(tmp_path, files)


# Before loading


def test_a_changed_file_is_refused_before_loading(tmp_path):
    out = prepared(tmp_path, tiny_model())
    weights = tmp_path / "source/model.safetensors"
    sound = weights.read_bytes()

    weights.write_bytes(sound[:-1] + b"X")
    with pytest.raises(ModelFilesError, match=r"model\.safetensors was changed.*Restore"):
        verify(out)
    weights.write_bytes(sound[:-8])
    with pytest.raises(ModelFilesError, match=rf"model\.safetensors has {len(sound) - 8} bytes, not {len(sound)}"):
        verify(out)
    weights.unlink()
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is missing \(its target .* is gone\)"):
        verify(out)
    weights.write_bytes(sound)
    verify(out)
    (out / "chat_template.jinja").write_text("other words")
    with pytest.raises(ModelFilesError, match=r"chat_template\.jinja was added"):
        verify(out)


def test_a_folder_that_was_not_finished_is_refused(tmp_path):
    out = prepared(tmp_path, tiny_model())
    (out / "model.json").unlink()
    with pytest.raises(ModelFilesError, match=r"model\.json is missing"):
        verify(out)


def test_a_model_built_in_place_is_recorded_and_verified(tmp_path):
    folder = local_model(tmp_path / "demo", tiny_model())
    write_record(folder, source="builtin", name="demo", revision=None)
    verify(folder)
    (folder / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ModelFilesError, match=rf"(?s)config\.json .*rm -r '{folder}'"):
        verify(folder)
