"""Fetches the files of a model or a dataset from the Hugging Face hub, ModelScope or a local folder.

Downloads go into the cache that each client keeps anyway, so a copy that is already there is used, and
HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and MODELSCOPE_CACHE mean what they mean elsewhere.
"""

import hashlib
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
from huggingface_hub import HfApi, constants, get_token, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, filter_repo_objects

from scripts.prepared import sha256_of

Kind = Literal["model", "dataset"]

ANSWER_SECONDS = 15  # the hub answers the first question within this time, or is said to be unreachable

# (name on ModelScope of what the hub calls otherwise; models mostly keep their name there)
MODELSCOPE_NAMES = {"openai/gsm8k": "AI-ModelScope/gsm8k"}


class SourceError(Exception):
    """A source could not give what was asked; the message says what, why, and how to go on."""


def say(text: str) -> None:
    """Prints a line at once: whoever waits for a download should see what for."""
    print(text, file=sys.stderr, flush=True)


def fetch(
    kind: Kind, source: str, name: str, revision: str | None, allow: Sequence[str], ignore: Sequence[str] = ()
) -> tuple[Path, str | None]:
    """Makes the wanted files of `name` lie in a folder on this machine.

    Args:
        kind: what `name` is.
        source: "hub", "modelscope" or "local".
        name: an id such as "Qwen/Qwen3-0.6B", or a folder for "local".
        revision: commit, tag or branch; None for the newest. "local" has none.
        allow, ignore: glob patterns over paths inside the repository.

    Returns:
        The folder and the revision that it holds (for the hub always a commit hash).

    Raises:
        SourceError: naming what could not be reached and the ways to go on.
    """
    if source == "hub":
        return _from_hub(kind, name, revision, list(allow), list(ignore))
    if source == "modelscope":
        return _from_modelscope(kind, name, revision, list(allow), list(ignore)), revision
    if source == "local":
        folder = Path(name).expanduser().absolute()
        if not folder.is_dir():
            found = "it is a file" if folder.exists() else "there is no such folder"
            raise SourceError(
                f"{kind_key(kind)}.name: {folder}: {found}. source: local wants the folder that holds the files."
            )
        return folder, None
    raise SourceError(f"{kind_key(kind)}.source: {source!r} is unknown; use hub, modelscope or local.")


# Hub


def _from_hub(
    kind: Kind, name: str, revision: str | None, allow: list[str], ignore: list[str]
) -> tuple[Path, str | None]:
    snapshot = partial(snapshot_download, name, repo_type=kind, allow_patterns=allow, ignore_patterns=ignore)
    if not constants.HF_HUB_OFFLINE:
        say(f"Asking {_endpoint()} for the {kind} {name} (gives up after {ANSWER_SECONDS} s without an answer)")
    try:
        ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
        info = ask(name, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS)
        commit, offered = info.sha or revision or "main", info.siblings or []
    except HFValidationError as error:
        raise SourceError(f"{kind_key(kind)}.name: {name!r} is no hub id such as 'Qwen/Qwen3-0.6B': {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, OfflineModeIsEnabled, ValueError, TypeError) as error:
        # Whatever the server says, a copy of this revision that the cache already holds is as good as a fresh one.
        try:
            folder = Path(snapshot(revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise SourceError(_explain(kind, name, revision, error)) from error
        say(f"{_reason(error)}; using the copy in the cache: {folder}")
        _check_digests(folder, allow, ignore)
        return folder, folder.name

    files = list(
        filter_repo_objects(offered, allow_patterns=allow, ignore_patterns=ignore, key=lambda file: file.rfilename)
    )
    if not files:
        raise SourceError(f"{_endpoint()}/{name} holds no file like {', '.join(allow)}; {_check_name(kind)}.")
    for file in files:  # both become paths on this machine
        digest = file.lfs.sha256 if file.lfs is not None else "0" * 64
        if ".." in Path(file.rfilename).parts or not re.fullmatch("[0-9a-f]{64}", digest):
            raise SourceError(f"{_endpoint()}/{name} lists {file.rfilename!r} ({digest}), which is no file of it.")
    try:
        missing = [file for file in files if not _is_cached(kind, name, commit, file.rfilename)]
        _announce(name, files, missing)
        for file in missing:
            if file.lfs is not None:
                _download_resumable(kind, name, commit, file)
        folder = Path(snapshot(revision=revision))
    except (httpx.HTTPError, LocalEntryNotFoundError) as error:
        raise SourceError(_explain(kind, name, revision, error, during_download=True)) from error
    except OSError as error:
        raise SourceError(
            f"The {kind} {name} could not be brought into {constants.HF_HUB_CACHE}: {error}\n"
            "Run the same command again; it goes on from here. For another disk, set HF_HOME."
        ) from error
    _check_digests(folder, allow, ignore)
    return folder, folder.name


def _is_cached(kind: Kind, name: str, commit: str, file: str) -> bool:
    return isinstance(try_to_load_from_cache(name, file, revision=commit, repo_type=kind), str)


def _announce(name: str, files: list, missing: list) -> None:
    """Says what the download costs before it starts, and stops where the disk is too small for it."""
    total, to_come = (sum(file.size or 0 for file in some) for some in (files, missing))
    cache = Path(constants.HF_HUB_CACHE)
    if not missing:
        say(f"{name}: all {len(files)} files ({_size(total)}) are in the cache {cache}")
        return
    say(f"{name}: {len(missing)} of {len(files)} files to download, {_size(to_come)} of {_size(total)}, to {cache}")
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if free < to_come:
        raise OSError(f"{_size(to_come)} are needed, {_size(free)} are free")


def _download_resumable(kind: Kind, name: str, commit: str, file: Any) -> None:
    """Puts one large file into the hub's cache, going on where an earlier, killed download stopped.

    huggingface_hub's own download starts a file again from its first byte when the process was killed. The bytes
    come through its client all the same; only the unfinished file has a name that the next process finds. The file
    enters the cache after its digest was checked, so a damaged download never gets in. And it is plain HTTP, which
    mirrors and proxies understand; the hub's Xet storage is on other hosts, which they may not reach.
    """
    folder = repo_folder_name(repo_id=name, repo_type=kind)
    blob = Path(constants.HF_HUB_CACHE, folder, "blobs", file.lfs.sha256)
    lock = Path(constants.HF_HUB_CACHE, ".locks", folder, f"{blob.name}.lock")  # the one huggingface_hub takes
    for parent in (blob.parent, lock.parent):
        parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        unfinished = blob.with_name(f"{blob.name}.incomplete")
        if unfinished.exists() and unfinished.stat().st_size > file.size:
            unfinished.unlink()  # two downloads at once, on a file system without locks
        with unfinished.open("ab") as stream:
            if stream.tell():
                say(f"{file.rfilename}: going on after {_size(stream.tell())}")
            http_get(
                hf_hub_url(name, file.rfilename, repo_type=kind, revision=commit),
                stream,
                resume_size=stream.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.rfilename,
            )
        actual = sha256_of(unfinished)
        if actual != blob.name:
            unfinished.unlink()
            raise SourceError(
                f"{file.rfilename} of {name} arrived damaged and was thrown away: its SHA-256 is {actual[:12]}..., "
                f"{_endpoint()} declares {blob.name[:12]}...\nRun the same command again; should it happen "
                "again, a proxy or the mirror changes the file: use another endpoint (HF_ENDPOINT)."
            )
        unfinished.replace(blob)


def _check_digests(folder: Path, allow: list[str], ignore: list[str]) -> None:
    """Compares the wanted files of a snapshot with the digests that the hub declared for them.

    The hub's cache keeps every file under the name that its server gave it: the SHA-256 of a large file, the git hash
    of a small one. So this needs no network, and finds what went wrong in the cache long after the download, too.

    Raises:
        SourceError: naming the damaged file and how to get a sound one.
    """
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    for name in filter_repo_objects(names, allow_patterns=allow, ignore_patterns=ignore):
        blob = (folder / name).resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name):
            actual = sha256_of(blob)
        elif re.fullmatch("[0-9a-f]{40}", blob.name):
            content = blob.read_bytes()
            actual = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        else:  # a cache without links keeps no such names
            continue
        if actual != blob.name:
            raise SourceError(
                f"{name} is damaged: its digest is {actual[:12]}..., the hub declares {blob.name[:12]}...\n"
                f"Remove the copy in the cache and run the same command again:\n  rm '{blob}'"
            )


def _reason(error: Exception) -> str:
    """One line, in words, on why the hub did not give what was asked. Never holds the token."""
    endpoint = _endpoint()
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set, so nothing is downloaded"
    elif isinstance(error, GatedRepoError) or status == 403:
        reason = f"{endpoint} asks for permission (HTTP {status})"
    elif isinstance(error, RevisionNotFoundError):
        reason = f"{endpoint} does not know this revision"
    elif isinstance(error, RepositoryNotFoundError) or status == 401:
        reason = f"{endpoint} does not show it: the name is wrong, or it is private (HTTP {status})"
    elif status is not None:
        reason = f"{endpoint} answered with HTTP {status}"
    elif isinstance(error, httpx.TimeoutException):
        reason = f"{endpoint} did not answer in time"
    elif isinstance(error, (httpx.HTTPError, httpx.InvalidURL)):
        reason = f"{endpoint} could not be reached ({error or type(error).__name__})"
    else:
        reason = f"{endpoint} did not answer like a hub ({str(error).splitlines()[0]})"
    token = get_token()
    return reason.replace(token, "***") if token else reason


def _explain(kind: Kind, name: str, revision: str | None, error: Exception, during_download: bool = False) -> str:
    what = f"the {kind} {name} (revision {revision or 'main'})"
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    reason = _reason(cause if isinstance(cause, Exception) else error)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    ways = []
    if during_download:
        head = f"The download of {what} stopped: {reason}."
        ways.append("run the same command again: what has arrived is kept")
    else:
        head = f"Could not get {what}: {reason}, and the cache {constants.HF_HUB_CACHE} does not hold it."
    if isinstance(error, OfflineModeIsEnabled):
        ways.append("go online for the download: unset HF_HUB_OFFLINE")
    elif status in (401, 403, 404):
        ways.append(_check_name(kind))
        if status != 404:
            page = f"{_endpoint()}/{'datasets/' if kind == 'dataset' else ''}{name}"
            ways.append(
                f"HF_TOKEN is set, but not accepted for it: ask for access at {page}, or renew the token"
                if get_token()
                else f"gated or private: ask for access at {page}, then set HF_TOKEN"
            )
    else:
        ways.append("check the network, and HTTPS_PROXY if you are behind a proxy")
    if constants.ENDPOINT == "https://huggingface.co":
        careful = " (unset HF_TOKEN first: it would be sent there)" if get_token() else ""
        ways.append(f"use a mirror: HF_ENDPOINT=https://hf-mirror.com before the same command{careful}")
    else:
        ways.append("use another endpoint: this one comes from HF_ENDPOINT (a mirror: https://hf-mirror.com)")
    ways += [
        f"use ModelScope: {kind_key(kind)}: {{source: modelscope, name: {MODELSCOPE_NAMES.get(name, name)}, "
        "revision: null}",
        f"use files that you have: {kind_key(kind)}: {{source: local, name: /path/to/folder}}",
        "use what is built in and needs no download: scale: demo",
    ]
    return "\n  - ".join([f"{head}\nWays on:", *ways])


def _endpoint() -> str:
    """The hub's address as it may be shown: without a password."""
    return re.sub("//[^/@]*@", "//***@", constants.ENDPOINT)


def _check_name(kind: Kind) -> str:
    return f"check {kind_key(kind)}.name and {kind_key(kind)}.revision in config.yaml"


def kind_key(kind: Kind) -> str:
    """The key of config.yaml that says where a model or a dataset comes from."""
    return "model" if kind == "model" else "data"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


# ModelScope


def _from_modelscope(kind: Kind, name: str, revision: str | None, allow: list[str], ignore: list[str]) -> Path:
    try:
        from modelscope import snapshot_download as modelscope_snapshot
    except ImportError as error:
        raise SourceError(
            f"{kind_key(kind)}.source: modelscope needs the package modelscope, which is not installed:\n"
            f"  '{sys.executable}' -m pip install modelscope\n"
            f"or: uv pip install --python '{sys.executable}' modelscope"
        ) from error
    snapshot = partial(
        modelscope_snapshot,
        repo_id=name,
        repo_type=kind,
        revision=revision,
        allow_patterns=allow,
        ignore_patterns=ignore or None,
    )
    say(f"Asking ModelScope for the {kind} {name} (it tries a few times, for some 20 s, where it has no answer)")
    try:
        return Path(snapshot())
    except Exception as error:  # its errors have no common base over its versions; each becomes one clear message
        try:
            folder = Path(snapshot(local_files_only=True))
        except Exception:
            folder = None
        if folder and any(path.is_file() for path in folder.rglob("*")):
            say(f"ModelScope failed ({error}); using the copy in the cache: {folder}")
            return folder
        raise SourceError(
            f"Could not get the {kind} {name} (revision {revision or 'master'}) from ModelScope: "
            f"{type(error).__name__}: {error}\nWays on:\n"
            f"  - check the network and {kind_key(kind)}.name, {kind_key(kind)}.revision in config.yaml "
            "(hub commits do not exist there: revision: null)\n"
            "  - run the same command again: what has arrived is kept\n"
            f"  - use the hub or files that you have: {kind_key(kind)}: {{source: hub}} or "
            "{source: local, name: /path/to/folder}\n"
            "  - use what is built in and needs no download: scale: demo"
        ) from error
