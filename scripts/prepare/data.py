"""Brings GSM8K, or questions in its form, into data/<id>/ as checked rows with a validation split.

    python -m scripts.prepare.data --settings '{"source": "hub", "name": "openai/gsm8k", ...}' --out data/<id>

Takes the hub's parquet files and the official JSONL alike; both give the same bytes. Nothing is removed: a row that
cannot be used stops the preparation, and questions that occur twice are counted and said.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from scripts.grpo_scratch.rewards import parse_gold
from scripts.prepare.demo_problems import make_problems
from scripts.prepare.sources import SourceError, fetch
from scripts.prepared import DataError, Row, decimal_text, jsonl_rows, listed

SPLITS = ("train", "test")
# Where a split may lie in a source: the official JSONL, or the hub's layout with the configuration "main".
LAYOUTS = ["{}.jsonl", "main/{}-*.parquet", "{}*.parquet", "data/{}-*.parquet", "main/{}.jsonl"]


def prepare(settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """Reads the source named by `settings` and writes {train,validation,test}.jsonl and data.json into `out`.

    Args:
        settings: source, name, revision, validation_rows, seed, expected_rows ({"train": n, "test": n} or None);
            train_rows and test_rows for the built-in problems.
        out: the folder to fill.

    Returns:
        What data.json holds.

    Raises:
        SourceError: the source did not give the files.
        DataError: naming file and line of up to ten faults.
    """
    source, name, revision = settings["source"], settings["name"], settings.get("revision")
    faults: list[str] = []
    if source == "builtin":
        problems = make_problems(settings["seed"], train_rows=settings["train_rows"], test_rows=settings["test_rows"])
        found = {
            split: [(f"built-in {split} problem {i}", row) for i, row in enumerate(problems[split])] for split in SPLITS
        }
    else:
        patterns = [layout.format(split) for split in SPLITS for layout in LAYOUTS]
        folder, revision = fetch("dataset", source, name, revision, patterns)
        found = {split: _source_rows(folder, split, faults) for split in SPLITS}
    rows = {
        split: [
            row
            for index, (place, record) in enumerate(found[split])
            if (row := _checked(f"{split}-{index:05d}", place, record, faults))
        ]
        for split in SPLITS
    }
    if faults:
        raise DataError(listed(f"{name}: {len(faults)} rows cannot be used:", faults))

    _check_counts(rows, settings.get("expected_rows"), name)
    duplicates = _duplicates(rows)
    train, validation = split_validation(rows["train"], rows["test"], settings["validation_rows"], settings["seed"])
    written = {"train": train, "validation": validation, "test": rows["test"]}
    record = _write(out, written, {"source": source, "name": name, "revision": revision}, settings, duplicates)
    print(_summary(out, record))
    return record


def split_validation(train: list[Row], test: list[Row], validation_rows: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Takes `validation_rows` rows out of `train`: those with the smallest SHA-256 of seed and id.

    So the split depends on the seed and the ids only, on no library's random numbers, and a larger validation set
    contains the smaller one. A question that occurs more than once stays in train, so that none is on both sides.

    Returns:
        The remaining train rows and the validation rows, both in the order of the source.

    Raises:
        DataError: `validation_rows` leaves nothing to train on.
    """
    occurrences = Counter(_normal(row) for row in [*train, *test])
    candidates = [row["id"] for row in train if occurrences[_normal(row)] == 1]
    if not 0 <= validation_rows < len(train) or validation_rows > len(candidates):
        raise DataError(
            f"data.validation_rows: {validation_rows} rows cannot be taken from {len(train)} train rows "
            f"({len(candidates)} with a question of their own); choose fewer."
        )
    candidates.sort(key=lambda id: hashlib.sha256(f"{seed} {id}".encode()).digest())
    chosen = set(candidates[:validation_rows])
    return [row for row in train if row["id"] not in chosen], [row for row in train if row["id"] in chosen]


# Reading


def _source_rows(folder: Path, split: str, faults: list[str]) -> list[tuple[str, Any]]:
    """The rows of a split with the place of each, from the first layout that holds any."""
    for layout in LAYOUTS:
        if files := sorted(folder.glob(layout.format(split))):
            return [
                row
                for path in files
                for row in (jsonl_rows(path, faults) if path.suffix == ".jsonl" else _parquet_rows(path))
            ]
    looked_for = ", ".join(layout.format(split) for layout in LAYOUTS)
    raise DataError(f"{folder} has no {split} split; looked for {looked_for}.")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        records = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}. Was it copied whole?") from error
    for number, record in enumerate(records, start=1):
        yield f"{path}, row {number}", record


def _checked(id: str, place: str, record: Any, faults: list[str]) -> Row | None:
    """The row to write, or None where it has a fault."""
    if not isinstance(record, dict):
        faults.append(f"{place}: no JSON object")
        return None
    for key in ("question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            what = (
                "is empty" if isinstance(record.get(key), str) else "is missing" if key not in record else "is no text"
            )
            others = f"; the row has {', '.join(map(str, record)) or 'nothing'}" if key not in record else ""
            faults.append(f"{place}: {key} {what}{others}")
            return None
        if not record[key].isascii() and re.search("[\ud800-\udfff]", record[key]):
            faults.append(f"{place}: {key} holds half a character (\\ud800 to \\udfff)")
            return None
    _, mark, tail = record["answer"].rpartition("####")
    if not mark:
        faults.append(f"{place}: answer has no '####' with the result behind it")
        return None
    try:
        gold = decimal_text(parse_gold(tail))
    except ValueError as error:
        faults.append(f"{place}: the result behind '####' is no number: {error}")
        return None
    return {"id": id, "question": record["question"], "gold": gold, "answer": record["answer"]}


# Checks over all rows


def _check_counts(rows: dict[str, list[Row]], expected: dict[str, int] | None, name: str) -> None:
    wrong = [
        f"{split} has {len(rows[split]):,} rows, not {expected[split]:,}"
        for split in SPLITS
        if expected and len(rows[split]) != expected[split]
    ]
    if empty := [split for split in SPLITS if not rows[split]]:
        raise DataError(f"{name}: {' and '.join(empty)} without any row.")
    if wrong:
        raise DataError(
            f"{name}: {'; '.join(wrong)}. The source is incomplete or another dataset; if it is meant to be, "
            "set data.expected_rows to its counts or to null."
        )


def _normal(row: Row) -> str:
    return " ".join(row["question"].split())


def _duplicates(rows: dict[str, list[Row]]) -> dict[str, int]:
    """Counts rows whose question occurred before: within a split, and test questions that stand in train too."""
    questions = {split: [_normal(row) for row in rows[split]] for split in SPLITS}
    repeated = {split: len(texts) - len(set(texts)) for split, texts in questions.items()}
    seen = set(questions["train"])
    return {**repeated, "test_in_train": sum(text in seen for text in questions["test"])}


# Writing


def _write(
    out: Path,
    splits: dict[str, list[Row]],
    origin: dict[str, Any],
    settings: dict[str, Any],
    duplicates: dict[str, int],
) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for split, rows in splits.items():
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        digest.update(content)
        _replace(out / f"{split}.jsonl", content)
    longest = max((row for rows in splits.values() for row in rows), key=lambda row: len(row["question"]))
    record = {
        **origin,
        "counts": {split: len(rows) for split, rows in splits.items()},
        "digest": digest.hexdigest(),
        "seed": settings["seed"],
        "duplicates": duplicates,
        "longest_question": {"id": longest["id"], "characters": len(longest["question"])},
    }
    _replace(out / "data.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    return record


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that it is never seen half-written."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _summary(out: Path, record: dict[str, Any]) -> str:
    counts = ", ".join(f"{split} {count:,}" for split, count in record["counts"].items())
    lines = [
        f"{out}: {record['name']} ({record['revision'] or record['source']}): {counts} rows, every gold is a number"
    ]
    repeated = record["duplicates"]
    if any(repeated.values()):
        lines.append(
            f"  kept although repeated: {repeated['train']} questions within train, {repeated['test']} within test; "
            f"{repeated['test_in_train']} test questions stand in train too"
        )
    longest = record["longest_question"]
    lines.append(f"  longest question: {longest['characters']} characters ({longest['id']})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch, check and split the questions.")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON, the section data: of config.yaml")
    parser.add_argument("--out", type=Path, required=True, help="the folder to fill, such as data/gsm8k")
    arguments = parser.parse_args()
    try:
        prepare(arguments.settings, arguments.out)
    except (SourceError, DataError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # a full disk, a folder that may not be written
        sys.exit(f"error: {arguments.out} could not be written: {error}")


if __name__ == "__main__":
    main()
