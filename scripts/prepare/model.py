"""Brings a model into models/<id>/ and records its files, so that nothing damaged is ever loaded.

    python -m scripts.prepare.model --settings '{"source": "hub", "name": ..., "revision": ...}' --out models/<id>

The files stay where they are (the hub's cache, a folder of yours); models/<id>/ holds links and model.json, which
keeps the size and SHA-256 of each. Every stage that loads the model calls `verify` first.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scripts.prepare.sources import SourceError, fetch
from scripts.prepared import FILES, RECORD, ModelFilesError, check, model_files, write_record

OTHER_FOLDERS = ["*/*"]


def prepare(settings: dict[str, Any], out: Path) -> None:
    """Links the model named by `settings` (source, name, revision) into `out` and records it there.

    Raises:
        SourceError: the source did not give it.
        ModelFilesError: it is no complete model.
    """
    source, name = settings["source"], settings["name"]
    folder, revision = fetch("model", source, name, settings.get("revision"), FILES, OTHER_FOLDERS)
    check(folder)
    out.mkdir(parents=True, exist_ok=True)
    for old in model_files(out):
        if not old.is_symlink():
            raise ModelFilesError(f"{old} is a file, not a link to one: {out} was filled by something else. Remove it.")
        old.unlink()
    (out / RECORD).unlink(missing_ok=True)
    for file in model_files(folder):
        (out / file.name).symlink_to(file)
    record = write_record(out, source, name, revision)
    total = sum(file["bytes"] for file in record["files"].values())
    print(f"{out}: {name} ({revision or source}), {len(record['files'])} files, {total / 1e9:.3f} GB, checked")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch, check and record a model.")
    parser.add_argument("--settings", type=json.loads, required=True, help='JSON: {"source", "name", "revision"}')
    parser.add_argument("--out", type=Path, required=True, help="the folder to fill, such as models/qwen3")
    arguments = parser.parse_args()
    try:
        prepare(arguments.settings, arguments.out)
    except (SourceError, ModelFilesError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # a full disk, a folder that may not be written
        sys.exit(f"error: {arguments.out} could not be written: {error}")


if __name__ == "__main__":
    main()
