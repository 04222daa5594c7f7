"""The hub and ModelScope on this machine, with one repository each: the few requests that downloads make."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ROOT = Path(__file__).parents[1]
NAME, COMMIT = "someone/something", "c" * 40


class _Server(ThreadingHTTPServer):
    """Serves `files` of one repository; the attributes make it misbehave."""

    handler: type["_Handler"]

    def __init__(self, files: dict[str, bytes], kind: str = "model"):
        super().__init__(("127.0.0.1", 0), self.handler)
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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def handle_error(self, request, client_address):
        """Says nothing: clients that a test kills hang up."""

    def close(self):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def answer(self, status, content=b"{}", headers=None, stop_after=None):
        span = self.headers.get("Range")
        headers = {"Accept-Ranges": "bytes", **(headers or {})}
        if status == 200 and span:
            start = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:stop_after])
            if stop_after and stop_after < len(content):
                time.sleep(8)  # the client is killed meanwhile


class _HubHandler(_Handler):
    def do_GET(self):
        hub, path = self.server, urlsplit(self.path).path
        hub.tokens.add(self.headers.get("Authorization"))
        api = f"/api/{hub.kind}s/{NAME}"
        if hub.status:
            self.answer(hub.status, headers={"X-Error-Code": hub.error_code, "X-Error-Message": "no"})
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name, **self.entry(name)} for name in hub.files]
            self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"{api}/tree/{COMMIT}":
            self.answer(
                200, json.dumps([{"type": "file", "path": name, **self.entry(name)} for name in hub.files]).encode()
            )
        elif match := re.fullmatch(f"(?:/datasets)?/{NAME}/resolve/{COMMIT}/(.+)", path):
            self.file(match[1])
        else:
            self.answer(404, headers={"X-Error-Code": "RevisionNotFound" if "/revision/" in path else "RepoNotFound"})

    def entry(self, name):
        content = self.server.files[name]
        git_hash = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"size": len(content), "blobId": git_hash, "oid": git_hash}
        if name.endswith((".safetensors", ".parquet")):
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 134}
        return entry

    def file(self, name):
        hub, entry = self.server, self.entry(name)
        large = "lfs" in entry
        if large and self.command == "GET":
            hub.ranges.append(self.headers.get("Range"))
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["lfs"]["sha256"] if large else entry["oid"]}"'}
        self.answer(200, hub.served.get(name, hub.files[name]), headers, hub.stop_after if large else None)


class _ModelScopeHandler(_Handler):
    def do_GET(self):
        server, url = self.server, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        api = f"/api/v1/{server.kind}s/{NAME}"
        if url.path in (f"{api}/repo/files", f"{api}/repo/tree"):
            files = [
                {
                    "Path": name,
                    "Name": name,
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                }
                for name, content in server.files.items()
            ]
            listed = files if query.get("PageNumber", "1") == "1" else []
            content = {"Code": 200, "Success": True, "Data": {"Files": listed}, "TotalCount": len(files)}
            self.answer(200, json.dumps(content).encode())
        elif url.path == f"{api}/repo" and query.get("FilePath") in server.files:
            self.answer(200, server.served.get(query["FilePath"], server.files[query["FilePath"]]))
        elif url.path == api:
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Name": NAME}}).encode())
        else:
            self.answer(404, json.dumps({"Code": 404, "Success": False, "Message": "not found"}).encode())


class Hub(_Server):
    handler = _HubHandler


class ModelScope(_Server):
    handler = _ModelScopeHandler


def start(stage: str, tmp_path: Path, settings: dict, **environment: str) -> subprocess.Popen:
    """Starts `python -m scripts.prepare.<stage>` as the pipeline does, with caches of its own under `tmp_path`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "MODELSCOPE_"))}
    caches = {"HF_HOME": str(tmp_path / "hf"), "MODELSCOPE_CACHE": str(tmp_path / "modelscope")}
    module = ["-m", f"scripts.prepare.{stage}", "--settings", json.dumps(settings), "--out", str(tmp_path / "out")]
    return subprocess.Popen(
        [sys.executable, *module],
        cwd=ROOT,
        env={**inherited, **caches, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(stage: str, tmp_path: Path, settings: dict, **environment: str) -> tuple[int, str]:
    """Runs a stage to its end; returns its exit code and everything it said."""
    process = start(stage, tmp_path, settings, **environment)
    said = "".join(process.communicate(timeout=60))
    assert "Traceback" not in said, said
    return process.returncode, said
