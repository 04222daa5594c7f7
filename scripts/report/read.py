"""What a run left in `results/<run>/`, read so that a missing or broken file becomes a sentence, never a trace."""

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.prepared import sha256_of

BASELINE = "baseline"
SHOWN = 3  # places of one file named in full; the others are counted
LARGEST = 1e100  # far above what fp32 holds; sums and products of such numbers stay finite


@dataclass
class Run:
    """One folder of results. `columns` holds metrics.csv by column: floats with None for gaps; `prompts` holds text.

    `faults` are (text key, values) pairs for the wording module: what could not be read, in the reader's terms.
    """

    name: str
    columns: dict[str, list[Any]] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    not_finite: dict[str, float] = field(default_factory=dict)  # column -> first step with nan or an infinity in it
    edited: bool = False  # metrics.csv is no longer the file that the run wrote: it says nothing about the run

    @property
    def trainer(self) -> str:
        return str(self.manifest.get("trainer") or "")

    @property
    def steps(self) -> int:
        """Optimizer steps recorded so far."""
        return len(self.columns.get("step", []))

    @property
    def steps_planned(self) -> int | None:
        return _mapping(_mapping(self.manifest.get("settings")).get("grpo")).get("steps")

    @property
    def asked(self) -> dict[str, Any]:
        """The settings the run was started with: the `grpo` section of its manifest."""
        return _mapping(_mapping(self.manifest.get("settings")).get("grpo"))

    @property
    def used(self) -> dict[str, Any]:
        """The values read off the run's finished objects."""
        return _mapping(self.manifest.get("used"))

    @property
    def finished(self) -> bool:
        planned = self.steps_planned
        complete = planned is None or self.steps >= planned
        # The digest of metrics.csv is written at a run's end; how many of its rows are left says nothing about that.
        return bool(self.manifest.get("finished")) and (self.edited or (self.steps > 0 and complete))

    def known(self, column: str) -> list[float]:
        """The numbers of a column without its gaps."""
        return [value for value in self.columns.get(column, []) if isinstance(value, float)]

    def score(self, kind: str) -> dict[str, Any]:
        """The `flexible` or `strict` entry of eval.json; empty where there is none."""
        score = _mapping(self.evaluation.get(kind))
        return score if _is_number(score.get("accuracy")) else {}

    @property
    def sampled(self) -> dict[str, Any]:
        """What eval.json says of several answers a question; empty where only one was asked for."""
        sampled = _mapping(self.evaluation.get("sampled"))
        shares = _mapping(sampled.get("pass_at_k"))
        known = {k: share for k, share in shares.items() if k.isdigit() and _is_number(share)}
        return {**sampled, "pass_at_k": known} if known else {}


def read_run(folder: Path, expected_columns: list[str]) -> Run:
    """Reads `metrics.csv`, `manifest.json`, `eval.json` and `samples.jsonl` of one run."""
    run = Run(folder.name)
    if not folder.is_dir():
        run.faults.append(("fault_no_folder", {"folder": folder.as_posix()}))
        return run
    run.manifest = _read_json(run, folder / "manifest.json")
    _compare_metrics(run, folder / "metrics.csv")
    run.columns = _read_metrics(run, folder / "metrics.csv", expected_columns)
    _read_evaluation(run, folder)
    return run


def read_baseline(folder: Path) -> Run:
    """Reads the evaluation of the untrained model."""
    run = Run(folder.name)
    _read_evaluation(run, folder)
    return run


def _read_evaluation(run: Run, folder: Path) -> None:
    run.evaluation = _read_json(run, folder / "eval.json")
    run.samples = _read_samples(run, folder / "samples.jsonl")


def _read_json(run: Run, path: Path) -> dict[str, Any]:
    if not path.is_file():
        run.faults.append(("fault_missing", {"file": path.name}))
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        run.faults.append(("fault_unreadable", {"file": path.name, "error": error}))
        return {}
    if not isinstance(content, dict):
        run.faults.append(("fault_unreadable", {"file": path.name, "error": "not a JSON object"}))
        return {}
    return content


def _compare_metrics(run: Run, path: Path) -> None:
    """Whether metrics.csv is the file that the manifest was written about; older manifests do not say."""
    recorded = run.manifest.get("metrics_sha256")
    if recorded is not None and path.is_file() and sha256_of(path) != recorded:
        run.edited = True
        run.faults.append(("fault_edited", {"file": path.name, "path": path.as_posix()}))


def _read_samples(run: Run, path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        run.faults.append(("fault_missing", {"file": path.name}))
        return {}
    samples = {}
    broken = []
    # Not splitlines(): a completion may hold U+2028, which JSON leaves as it is and splitlines() would cut at.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            samples[str(row["id"])] = row
        except (ValueError, TypeError, KeyError):
            broken.append(str(number))
    _say_lines(run, path, broken)
    return samples


def _read_metrics(run: Run, path: Path, expected: list[str]) -> dict[str, list[Any]]:
    if not path.is_file():
        run.faults.append(("fault_missing", {"file": path.name}))
        return {}
    header: list[str] = []
    # A step may stand there twice: the later row is taken, as the one that training went on from.
    rows: dict[float, tuple[str, dict[str, Any]]] = {}
    broken: list[str] = []
    found: list[tuple[str, dict[str, Any]]] = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:  # spreadsheets put a mark in front
        reader = csv.DictReader(file)
        try:
            header = [name for name in reader.fieldnames or [] if name]
            ended = reader.line_num
            for row in reader:
                line = _lines(ended + 1, reader.line_num)
                ended = reader.line_num
                step = _number(row.get("step"))
                torn = None in row or None in row.values()  # too many or too few cells: the line a kill cut short
                if not torn and "step" in header:
                    found += _cells_without_number(run, path, line, row)
                if torn or step is None or step != int(step):
                    broken.append(line)
                    continue
                if step in rows:
                    both = {"step": int(step), "first": rows[step][0], "second": line}
                    found.append(("fault_twice", {"file": path.name, **both}))
                rows[step] = line, row
        except csv.Error as error:  # such as a quotation mark that makes one cell of everything after it
            said = {"file": path.name, "line": _lines(ended + 1, reader.line_num), "error": error}
            run.faults.append(("fault_csv", said))
    absent = [name for name in expected if name not in header]
    if header and absent:
        run.faults.append(("fault_columns", {"file": path.name, "columns": ", ".join(absent)}))
    if header and "step" not in header:
        return {}  # without it no row has a place; that it is missing was just said
    _say_lines(run, path, broken)
    run.faults += found[:SHOWN]
    if len(found) > SHOWN:
        run.faults.append(("fault_more", {"file": path.name, "count": len(found) - SHOWN}))
    if not rows:
        run.faults.append(("fault_no_rows", {"file": path.name}))
        return {}
    ordered = [rows[step][1] for step in sorted(rows)]
    columns: dict[str, list[Any]] = {
        name: [row[name] if name == "prompts" else _number(row[name]) for row in ordered] for name in header
    }
    for name in header:
        steps = [step for step in sorted(rows) if name != "prompts" and _is_not_finite(rows[step][1][name])]
        if steps:
            run.not_finite[name] = steps[0]
    return columns


def _cells_without_number(run: Run, path: Path, line: str, row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Cells without the number that belongs there. A nan that the run itself wrote is a matter of its health."""
    return [
        ("fault_cell", {"file": path.name, "line": line, "column": name, "text": repr(text[:40])})
        for name, text in row.items()
        if name and name != "prompts" and text.strip() and _number(text) is None
        if run.edited or name == "step" or not _is_not_finite(text)
    ]


def _lines(first: int, last: int) -> str:
    """A row's place in its file; a cell may hold line breaks."""
    return str(first) if first >= last else f"{first}\u2013{last}"


def _say_lines(run: Run, path: Path, broken: list[str]) -> None:
    if broken:
        run.faults.append(
            ("fault_lines", {"file": path.name, "count": len(broken), "lines": ", ".join(broken[:SHOWN])})
        )


def _number(text: str | None) -> float | None:
    """A number, or None for an empty cell, words, nan, infinities and what no run can measure: gaps in a curve."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < LARGEST else None


def _is_not_finite(text: str) -> bool:
    try:
        return not math.isfinite(float(text))
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
