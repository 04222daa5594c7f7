"""Models from every source arrive whole and checked, and nothing damaged is loaded."""

import hashlib
import json
import re
import shutil
import time
from pathlib import Path

import numpy
import pytest
from fake_hub import COMMIT, NAME, Hub, ModelScope, run, start
from safetensors.numpy import save, save_file

from scripts.prepare.model import prepare
from scripts.prepared import ModelFilesError, verify, write_record

TOKEN = "hf_secretsecretsecret"
FROM_HUB = {"source": "hub", "name": NAME, "revision": COMMIT}


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
    with Hub({**tiny_model(), "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "README.md": b"hello"}) as hub:
        yield hub


def download(hub: Hub, tmp_path: Path, **environment: str) -> tuple[int, str]:
    return run("model", tmp_path, FROM_HUB, HF_ENDPOINT=hub.url, **environment)


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
    code, said = download(hub, tmp_path)
    assert code == 0, said
    assert "4 of 4 files to download" in said
    out = tmp_path / "out"
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names | {"model.json"}, "no pickle, no other folder"
    record = json.loads((out / "model.json").read_text())
    weights = hub.files["model.safetensors"]
    fingerprint = {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    assert record["files"]["model.safetensors"] == fingerprint
    assert (record["source"], record["name"], record["revision"]) == ("hub", NAME, COMMIT)
    verify(out)

    hub.close()
    shutil.rmtree(out)
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        code, said = download(hub, tmp_path, **environment)
        assert code == 0 and "using the copy in the cache" in said, said
        verify(out)


def test_the_newest_revision_is_recorded_as_a_commit(hub, tmp_path):
    code, said = run("model", tmp_path, {**FROM_HUB, "revision": None}, HF_ENDPOINT=hub.url)
    assert code == 0, said
    assert json.loads((tmp_path / "out/model.json").read_text())["revision"] == COMMIT
    code, said = run("model", tmp_path, {**FROM_HUB, "revision": None}, HF_HUB_OFFLINE="1")
    assert code == 0, said


def test_a_killed_download_goes_on_where_it_stopped(tmp_path):
    with Hub(tiny_model(weights=6_000_000)) as hub:  # 24 MB
        hub.stop_after = 15_000_000
        process = start("model", tmp_path, FROM_HUB, HF_ENDPOINT=hub.url)
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size > 1_000_000 for path in tmp_path.rglob("*.incomplete")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.communicate()
        assert not (tmp_path / "out").exists()

        hub.stop_after = None
        code, said = download(hub, tmp_path)
        assert code == 0 and "going on after" in said, said
        assert hub.ranges[0] is None and int(re.fullmatch(r"bytes=(\d+)-", hub.ranges[-1])[1]) > 1_000_000
        verify(tmp_path / "out")


def test_a_file_with_another_digest_than_declared_is_refused(hub, tmp_path):
    sound = hub.files["model.safetensors"]
    hub.served["model.safetensors"] = sound[:-1] + b"X"
    code, said = download(hub, tmp_path)
    assert code == 1 and "model.safetensors" in said and "damaged" in said
    assert not (tmp_path / "out/model.json").exists()
    hub.served.clear()
    code, said = download(hub, tmp_path)
    assert code == 0, "the same command again, as the message says"


def test_a_copy_in_the_cache_that_was_damaged_is_refused_with_the_remedy(hub, tmp_path):
    assert download(hub, tmp_path)[0] == 0
    for name in ("config.json", "model.safetensors"):
        cached = (tmp_path / "out" / name).resolve()
        cached.write_bytes(cached.read_bytes()[:-1] + b" ")
        code, said = download(hub, tmp_path)
        assert code == 1 and f"{name} is damaged" in said
        Path(re.search(r"^  rm '(.*)'$", said, re.MULTILINE)[1]).unlink()
        assert download(hub, tmp_path)[0] == 0


def test_a_repository_without_any_model_file_is_named(tmp_path):
    with Hub({"README.md": b"hello"}) as hub:
        code, said = download(hub, tmp_path)
    assert code == 1 and NAME in said and "holds no file like" in said


def test_a_hub_that_has_had_enough_of_us_is_not_needed_for_what_is_here(hub, tmp_path):
    assert download(hub, tmp_path)[0] == 0
    hub.status = 429
    code, said = download(hub, tmp_path)
    assert code == 0 and "HTTP 429; using the copy in the cache" in said


def test_the_source_is_what_config_says_whatever_the_other_hub_has_set(hub, tmp_path):
    code, _ = download(hub, tmp_path, VLLM_USE_MODELSCOPE="True", USE_MODELSCOPE_HUB="1")
    assert code == 0 and json.loads((tmp_path / "out/model.json").read_text())["source"] == "hub"


def test_a_download_that_does_not_fit_on_the_disk_is_not_begun(hub, tmp_path):
    entry = hub.RequestHandlerClass.entry

    def enormous(handler, name):
        listed = entry(handler, name)
        return {**listed, "size": 10**17} | ({"lfs": {**listed["lfs"], "size": 10**17}} if "lfs" in listed else {})

    hub.RequestHandlerClass = type("Handler", (hub.RequestHandlerClass,), {"entry": enormous})
    code, said = download(hub, tmp_path)
    assert code == 1 and re.search(r"400000000\.00 GB are needed, [\d.]+ GB are free\n.*HF_HOME", said)
    assert not hub.ranges, "nothing was fetched"


def test_a_hub_that_names_files_outside_of_the_repository_is_refused(hub, tmp_path):
    entry = hub.RequestHandlerClass.entry

    def hostile(handler, name):
        listed = entry(handler, name)
        if "lfs" in listed:
            listed["lfs"]["sha256"] = "../../../../outside"
        return listed

    hub.RequestHandlerClass = type("Handler", (hub.RequestHandlerClass,), {"entry": hostile})
    code, said = download(hub, tmp_path)
    assert code == 1 and "lists 'model.safetensors' (../../../../outside), which is no file of it" in said
    assert not list(tmp_path.rglob("outside*"))


def test_an_unreachable_hub_is_named_with_the_ways_on(tmp_path):
    with Hub({}) as hub:
        pass
    started = time.monotonic()
    code, said = download(hub, tmp_path)
    assert code == 1 and time.monotonic() - started < 15
    for words in (hub.url, NAME, COMMIT, "HTTPS_PROXY", "hf-mirror.com", "modelscope", "source: local", "scale: demo"):
        assert words in said

    code, said = download(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert code == 1 and "unset HF_HUB_OFFLINE" in said and str(tmp_path / "hf") in said


@pytest.mark.parametrize(
    "status, error_code, words",
    [
        (401, "GatedRepo", ["permission", "HTTP 401", "HF_TOKEN is set"]),
        (403, "", ["permission", "HTTP 403", "HF_TOKEN is set"]),
        (401, "", ["HTTP 401", "HF_TOKEN is set"]),
        (404, "RepoNotFound", ["HTTP 404", "check model.name"]),
        (404, "RevisionNotFound", ["does not know this revision", "check model.name and model.revision"]),
        (429, "", ["HTTP 429", "https://hf-mirror.com"]),
        (503, "", ["HTTP 503", "https://hf-mirror.com"]),
    ],
)
def test_a_refusal_of_the_hub_is_explained_without_the_token(hub, tmp_path, status, error_code, words):
    hub.status, hub.error_code = status, error_code
    code, said = download(hub, tmp_path, HF_TOKEN=TOKEN)
    assert code == 1
    for word in words:
        assert word in said
    assert f"Bearer {TOKEN}" in hub.tokens and TOKEN not in said


@pytest.mark.parametrize("status", [None, 503])
def test_a_password_in_the_hubs_address_is_not_shown(hub, tmp_path, status):
    hub.status = status
    code, said = run("model", tmp_path, FROM_HUB, HF_ENDPOINT=hub.url.replace("//", "//me:open-sesame@"))
    assert code == (1 if status else 0) and "http://***@127.0.0.1" in said and "open-sesame" not in said


def test_a_gated_model_without_token_asks_for_one(hub, tmp_path):
    hub.status, hub.error_code = 401, "GatedRepo"
    assert "then set HF_TOKEN" in download(hub, tmp_path)[1]


# From ModelScope


def test_a_model_comes_from_modelscope(tmp_path):
    pytest.importorskip("modelscope")
    from_modelscope = {"source": "modelscope", "name": NAME, "revision": None}
    with ModelScope({**tiny_model(), "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}) as server:
        code, said = run("model", tmp_path, from_modelscope, MODELSCOPE_ENDPOINT=server.url)
        assert code == 0, said
        verify(tmp_path / "out")
        assert not (tmp_path / "out/pytorch_model.bin").exists()


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


@pytest.mark.parametrize(
    "architecture", ["BertForMaskedLM", "ViTForImageClassification", "T5ForConditionalGeneration", "LlamaForReward"]
)
def test_a_model_that_writes_no_text_is_refused_by_name(tmp_path, architecture):
    config = json.dumps({"model_type": "some", "architectures": [architecture]}).encode()
    with pytest.raises(ModelFilesError, match=rf"source holds {architecture}, which does not write text.*ForCausalLM"):
        prepared(tmp_path, {**tiny_model(), "config.json": config})


def test_an_adapter_is_refused_with_the_way_to_merge_it(tmp_path):
    with pytest.raises(ModelFilesError, match=r"adapter_config\.json\)\. Merge it first: .*merge_and_unload"):
        prepared(tmp_path, {**tiny_model(), "adapter_config.json": b"{}"})


@pytest.mark.parametrize("asks", ["config.json", "tokenizer_config.json"])
def test_a_model_that_needs_code_of_its_own_is_refused(tmp_path, asks):
    files = {**tiny_model(), "config.json": b'{"model_type": "unheard_of"}', "modeling.py": b"raise SystemExit"}
    files[asks] = json.dumps({**json.loads(files[asks]), "auto_map": {"AutoConfig": "modeling.Config"}}).encode()
    with pytest.raises(ModelFilesError, match=r"\(unheard_of\) .* only by running the Python code .*is not run here"):
        prepared(tmp_path, files)


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
