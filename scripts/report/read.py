"""What a run left in `results/<run>/`, read so that a missing or broken file becomes a sentence, never a trace."""

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASELINE = "baseline"


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
        return bool(self.manifest.get("finished")) and self.steps > 0 and complete

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
    run.columns = _read_metrics(run, folder / "metrics.csv", expected_columns)
    run.manifest = _read_json(run, folder / "manifest.json")
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


def _read_samples(run: Run, path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        run.faults.append(("fault_missing", {"file": path.name}))
        return {}
    samples = {}
    broken = 0
    # Not splitlines(): a completion may hold U+2028, which JSON leaves as it is and splitlines() would cut at.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            samples[str(row["id"])] = row
        except (ValueError, TypeError, KeyError):
            broken += 1
    if broken:
        run.faults.append(("fault_lines", {"file": path.name, "count": broken}))
    return samples


def _read_metrics(run: Run, path: Path, expected: list[str]) -> dict[str, list[Any]]:
    if not path.is_file():
        run.faults.append(("fault_missing", {"file": path.name}))
        return {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        header = [name for name in reader.fieldnames or [] if name]
        # A run that was killed and resumed may hold a step twice: the later row is the one training went on from.
        rows: dict[float, dict[str, Any]] = {}
        broken = 0
        for row in reader:
            step = _number(row.get("step"))
            torn = None in row or None in row.values()  # too many or too few cells: the line a kill cut short
            if step is None or torn:
                broken += 1
            else:
                rows[step] = row
    if broken:
        run.faults.append(("fault_lines", {"file": path.name, "count": broken}))
    if not rows:
        run.faults.append(("fault_no_rows", {"file": path.name}))
        return {}
    absent = [name for name in expected if name not in header]
    if absent:
        run.faults.append(("fault_columns", {"file": path.name, "columns": ", ".join(absent)}))
    ordered = [rows[step] for step in sorted(rows)]
    columns: dict[str, list[Any]] = {
        name: [row[name] if name == "prompts" else _number(row[name]) for row in ordered] for name in header
    }
    for name in header:
        steps = [step for step in sorted(rows) if name != "prompts" and _is_not_finite(rows[step][name])]
        if steps:
            run.not_finite[name] = steps[0]
    return columns


def _number(text: str | None) -> float | None:
    """A finite float, or None for an empty cell, words, nan and infinities: all of them are gaps in a curve."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_not_finite(text: str) -> bool:
    try:
        return not math.isfinite(float(text))
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
