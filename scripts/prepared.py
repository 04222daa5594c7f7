"""What the stages read of prepared models and data, and the checks before they do.

models/<id>/ holds a model and model.json, with size and SHA-256 of each file; data/<id>/ holds rows of questions.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

RECORD = "model.json"
# What transformers and vLLM read: configuration, tokenizer, chat template, weights. Only files beside config.json,
# and never pickles (*.bin, *.pt), which can run code when they are loaded.
FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "model*.safetensors"]
FAULTS_SHOWN = 10

Row = dict[str, str]


class ModelFilesError(Exception):
    """Files of a model are missing, damaged or changed; the message names them and the way out."""


class DataError(Exception):
    """Questions cannot be used; the message names file and line, and what is wrong with each."""


def model_files(folder: Path) -> list[Path]:
    """The files of a model in `folder`, sorted by name; model.json, our record of them, is not one."""
    return sorted({path for pattern in FILES for path in folder.glob(pattern) if path.name != RECORD})


def verify(folder: Path | str) -> None:
    """Compares the files in `folder` with model.json. Call it before loading them; reads each file once.

    Raises:
        ModelFilesError: naming the first file that is missing, changed or added, and the way out.
    """
    folder = Path(folder)
    record = _read_json(folder / RECORD, "the folder was not prepared to its end")
    source, files = record.get("source"), record.get("files", {})
    for name, recorded in files.items():
        path = folder / name
        if not path.exists():
            target = f" (its target {path.readlink()} is gone)" if path.is_symlink() else ""
            raise ModelFilesError(f"{path} is missing{target}. {_way_out(path, source)}")
        if (size := path.stat().st_size) != recorded["bytes"]:
            raise ModelFilesError(f"{path} has {size:,} bytes, not {recorded['bytes']:,}. {_way_out(path, source)}")
        if (sha256 := sha256_of(path)) != recorded["sha256"]:
            differs = f"has SHA-256 {sha256[:12]}..., not {recorded['sha256'][:12]}..."
            raise ModelFilesError(f"{path} was changed: it {differs} {_way_out(path, source)}")
    if added := [path for path in model_files(folder) if path.name not in files]:
        raise ModelFilesError(f"{added[0]} was added after the model was recorded. Remove it, or remove {folder}.")


def write_record(folder: Path, source: str, name: str, revision: str | None) -> dict[str, Any]:
    """Checks the model in `folder` and writes model.json: where it came from, size and SHA-256 of each file.

    Raises:
        ModelFilesError: it is no complete model.
    """
    check(folder)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in model_files(folder)}
    record = {"source": source, "name": name, "revision": revision, "files": files}
    unfinished = folder / f".{RECORD}.tmp"
    unfinished.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / RECORD)
    return record


def check(folder: Path) -> None:
    """Checks that `folder` holds a whole model with tokenizer and chat template; reads headers, not the weights.

    Raises:
        ModelFilesError: naming the folder or the file, and what is wrong.
    """
    if (folder / "adapter_config.json").exists():
        raise ModelFilesError(
            f"{folder} holds an adapter (adapter_config.json). Merge it first: load it with peft, merge_and_unload(), "
            "save_pretrained() to another folder, and take that (source: local)."
        )
    config = _read_json(folder / "config.json", "no model folder without it")
    if not config.get("model_type"):
        raise ModelFilesError(f"{folder / 'config.json'} has no model_type, so it describes no transformers model.")
    architectures = config.get("architectures") or ["ForCausalLM"]  # some leave it out
    if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise ModelFilesError(
            f"{folder} holds {', '.join(map(str, architectures))}, which does not write text word by word. Take a "
            "causal language model (…ForCausalLM)."
        )

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelFilesError(f"{folder} has no tokenizer (tokenizer.json); copy it from the model this one came from.")
    tokenizer_config = _read_json(folder / "tokenizer_config.json", "the tokenizer needs it")
    templates = [folder / "chat_template.jinja", folder / "chat_template.json"]
    if not tokenizer_config.get("chat_template") and not any(path.exists() for path in templates):
        raise ModelFilesError(
            f"{folder} has a tokenizer without a chat template; prompts cannot be written. Take an instruction-tuned "
            "model (…-Instruct), or put a chat_template.jinja beside tokenizer_config.json (source: local)."
        )
    if "auto_map" in config or "auto_map" in tokenizer_config:
        _check_needs_no_code(folder, config["model_type"], "auto_map" in tokenizer_config)
    _check_weights(folder)


def _check_needs_no_code(folder: Path, model_type: str, tokenizer: bool) -> None:
    """A model may bring Python code of its own (auto_map). It is never run: transformers must know it without."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & (TOKENIZER_MAPPING_NAMES.keys() if tokenizer else {model_type})
    if model_type not in known:
        raise ModelFilesError(
            f"{folder} holds a model ({model_type}) that transformers could load only by running the Python code that "
            "it names (auto_map). Such code is not run here; take a model that transformers knows by itself."
        )


def _check_weights(folder: Path) -> None:
    """Opens each weight file: safetensors checks its header against the file's length."""
    weights = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    shards: dict[str, set[str]] = {path.name: set() for path in weights}
    if index.exists():
        for tensor, shard in _read_json(index, "it lists the weights").get("weight_map", {}).items():
            shards.setdefault(shard, set()).add(tensor)
    if not shards:
        others = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors")
        )
        found = f" It holds {', '.join(others)}; " if others else " "
        raise ModelFilesError(
            f"{folder} holds no weights: no model*.safetensors.{found}"
            "Pickled weights are not read (they can run code); adapters must be "
            "merged first: save the model with save_pretrained, which writes safetensors."
        )
    for shard, wanted in shards.items():
        path = folder / shard
        if not path.exists():
            raise ModelFilesError(f"{path} is missing, but {index.name} lists it. Download or copy it again.")
        try:
            with safe_open(path, framework="numpy") as tensors:
                names = set(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(
                f"{path} ({path.stat().st_size:,} bytes) is no whole safetensors file: {error}. "
                "It is damaged or was downloaded in part; download or copy it again."
            ) from error
        if absent := wanted - names or (set() if names else {"any tensor"}):
            raise ModelFilesError(f"{path} lacks {', '.join(sorted(absent)[:3])}; it does not belong to {index.name}.")


def read_rows(path: Path | str) -> list[Row]:
    """Reads a prepared file, such as data/<id>/train.jsonl: rows of id, question, gold and answer.

    Raises:
        DataError: naming the file, the damaged line and the way out.
    """
    faults: list[str] = []
    rows = []
    for place, record in jsonl_rows(Path(path), faults):
        if isinstance(record, dict) and all(isinstance(record.get(key), str) for key in ("id", "question", "gold")):
            rows.append(record)
        else:
            faults.append(f"{place}: no prepared row (id, question, gold)")
    if faults:
        way_out = f"Remove {Path(path).parent} and run the same command again; it is written anew."
        raise DataError(listed(f"{path} is damaged:", faults) + f"\n{way_out}")
    return rows


def jsonl_rows(path: Path, faults: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: JSON strings may hold other line separators
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            yield place, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            faults.append(f"{place}: no JSON ({error})")


def decimal_text(value: Fraction) -> str:
    """Writes a number the one canonical way: "1200", "-3", "0.25".

    Raises:
        ValueError: it has no finite decimal form.
    """
    if value.denominator == 1:
        return str(value.numerator)
    try:
        quotient = Context(prec=100, traps=[Inexact]).divide(Decimal(value.numerator), Decimal(value.denominator))
    except Inexact:
        raise ValueError(f"{value} has no finite decimal form") from None
    return f"{quotient:f}"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _way_out(path: Path, source: str | None) -> str:
    folder, file = path.parent, path.resolve()
    if source == "local":
        return (
            f"The model was not loaded. Restore {file}; if the change is meant, remove {folder} and run the same "
            "command again."
        )
    damaged = f" '{file}'" if path.is_symlink() and file.exists() else ""
    return f"The model was not loaded. Remove it and run the same command again:\n  rm -r '{folder}'{damaged}"


def _read_json(path: Path, why: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFilesError(f"{path} is missing: {why}.") from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} holds no JSON object.")
    return content


def listed(head: str, faults: list[str]) -> str:
    more = [f"and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
    return "\n  ".join([head, *faults[:FAULTS_SHOWN], *more])
