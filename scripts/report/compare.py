"""What the runs' results say when held against each other: paired tests, settings, the three-place check, the time.

Nothing here is wording: functions return numbers and verdict keys, `words.py` says them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from scipy.stats import binomtest, norm

from scripts.report.read import Run

SIGNIFICANT = 0.05
PHASES = ("seconds_rollout", "seconds_reward", "seconds_train", "seconds_push")
MISSING = object()


class Paired(NamedTuple):
    """Two sets of graded answers to the same questions, a 2 x 2 table and what follows from it."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p: float
    difference: float
    low: float
    high: float

    @property
    def questions(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither


def paired(first: Mapping[str, bool], second: Mapping[str, bool]) -> Paired | None:
    """Compares two runs' grades (id -> right) on the questions both answered; None when they share none.

    `p` is McNemar's exact test: under "equally good" each question that only one run got right is a fair coin toss.
    `difference` is accuracy of the second minus the first, a share, with a 95 % interval for paired proportions
    (Wald after adding one half to each cell: Agresti and Min, Statistics in Medicine 24, 2005, 729-740).
    """
    shared = [question for question in first if question in second]
    if not shared:
        return None
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for question in shared:
        counts[bool(first[question]), bool(second[question])] += 1
    only_first, only_second = counts[True, False], counts[False, True]
    discordant = only_first + only_second
    p = binomtest(only_first, discordant, 0.5).pvalue if discordant else 1.0
    total = len(shared) + 2
    centre = (only_second - only_first) / total
    spread = math.sqrt(max(discordant + 1 - (only_second - only_first) ** 2 / total, 0.0)) / total
    half = float(norm.ppf(0.975)) * spread
    return Paired(
        both=counts[True, True],
        only_first=only_first,
        only_second=only_second,
        neither=counts[False, False],
        p=float(p),
        difference=(only_second - only_first) / len(shared),
        low=max(centre - half, -1.0),
        high=min(centre + half, 1.0),
    )


def right(run: Run) -> dict[str, bool]:
    """id -> whether the run's completion was graded right (flexible score)."""
    return {name: bool(row.get("correct")) for name, row in run.samples.items()}


def paired_all(runs: Sequence[Run]) -> list[tuple[int, int, Paired]]:
    """Every pair of runs that answered common questions, as indices into `runs` and their table."""
    tables = []
    for (i, first), (j, second) in combinations(enumerate(runs), 2):
        table = paired(right(first), right(second))
        if table:
            tables.append((i, j, table))
    return tables


def corrected(pairs: Sequence[tuple[int, int, Paired]]) -> list[float]:
    """p of every pair times their number (Bonferroni): among many pairs one looks different by chance."""
    return [min(1.0, table.p * len(pairs)) for _, _, table in pairs]


def gain(baseline: Run, run: Run) -> str:
    """`raised`, `lowered`, `unchanged` (no difference that the paired test finds) or `unknown`."""
    before, after = baseline.score("flexible"), run.score("flexible")
    if not before or not after:
        return "unknown"
    table = paired(right(baseline), right(run))
    if table and table.p >= SIGNIFICANT:
        return "unchanged"
    if not table and _overlap(before, after):
        return "unchanged"
    return "raised" if after["accuracy"] > before["accuracy"] else "lowered"


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two intervals meet; the fallback where completions are missing and answers cannot be paired."""
    bounds = [one.get("low"), one.get("high"), other.get("low"), other.get("high")]
    if not all(isinstance(bound, int | float) for bound in bounds):
        return True
    return one["low"] <= other["high"] and other["low"] <= one["high"]


def step_seconds(run: Run) -> float | None:
    """Median seconds of an optimizer step: a mean would smear the start-up work of the first steps over the rest."""
    seconds = run.known("seconds_step")
    return median(seconds) if seconds else None


# Settings


class Row(NamedTuple):
    """One setting: what each run asked for and really used (MISSING where it says neither), and the verdict."""

    setting: str
    trl_name: str
    asked: list[Any]
    used: list[Any]
    verdict: str  # same | asked | differs | alone


def settings_rows(runs: Sequence[Run]) -> list[Row]:
    """All settings the runs know, in the order of config.yaml, differences that nobody asked for first.

    Verdicts: `same`; `asked`, the runs used different values because they were told to; `differs`, without being
    told to; `alone`, fewer than two runs say what they used.
    """
    names: dict[str, None] = {}
    for source in [run.asked for run in runs] + [run.used for run in runs]:
        for name in source:
            names.setdefault(name)
    rows = []
    for name in names:
        asked = [run.asked.get(name, MISSING) for run in runs]
        used = [run.used.get(name, MISSING) for run in runs]
        rows.append(Row(name, _trl_name(runs, name), asked, used, _verdict(asked, used)))
    order = {"differs": 0, "asked": 1, "same": 2, "alone": 3}
    return sorted(rows, key=lambda row: order[row.verdict])


def _trl_name(runs: Sequence[Run], name: str) -> str:
    for run in runs:
        names = run.manifest.get("used_as")
        if isinstance(names, dict) and name in names:
            return str(names[name])
    return ""


def _verdict(asked: list[Any], used: list[Any]) -> str:
    known = [value for value in used if value is not MISSING]
    if len(known) < 2:
        return "alone"
    if all(same(value, known[0]) for value in known):
        return "same"
    wanted = [value for value in asked if value is not MISSING]
    return "differs" if all(same(value, wanted[0]) for value in wanted) else "asked"


def same(one: Any, other: Any) -> bool:
    """Equal as a setting: 1, 1.0 and a value that went through 32-bit floats are the same number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(one == other)


# The three places where two GRPO loops usually part


class Check(NamedTuple):
    """One of the three places: the values a run, and the verdict with what it rests on."""

    place: str  # batch | loss | correction
    values: list[dict[str, Any]]
    verdict: str  # same | differs | unknown | single
    details: list[tuple[str, dict[str, Any]]]


CHECKED = {
    "batch": ("sequences_per_step", "prompts_per_step"),
    "loss": ("loss_type", "scale_rewards"),
    "correction": ("importance_correction",),
}


def three_places(runs: Sequence[Run]) -> list[Check]:
    """Batch semantics, loss type and importance correction of every run against the first."""
    return [_check(place, names, runs) for place, names in CHECKED.items()]


def _check(place: str, names: tuple[str, ...], runs: Sequence[Run]) -> Check:
    values = [{name: run.used.get(name, MISSING) for name in names} for run in runs]
    if len(runs) < 2:
        return Check(place, values, "single", [])
    verdicts = []
    details: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        known = [value[name] for value in values]
        if any(value is MISSING for value in known):
            verdicts.append("unknown")
            silent = [run.name for run, value in zip(runs, known, strict=True) if value is MISSING]
            details.append(("check_not_said", {"setting": name, "runs": ", ".join(silent)}))
        elif all(same(value, known[0]) for value in known):
            verdicts.append("same")
        else:
            verdicts.append("differs")
            details.append(("check_differs", {"setting": name}))
    if place == "batch":
        for run in runs[1:]:
            verdict, detail = same_prompts(runs[0], run)
            verdicts.append(verdict)
            details.append(detail)
    worst = next(verdict for verdict in ("differs", "unknown", "same") if verdict in verdicts)
    return Check(place, values, worst, details)


def same_prompts(first: Run, second: Run) -> tuple[str, tuple[str, dict[str, Any]]]:
    """Whether both runs trained on the same questions, step for step, over the steps both have."""
    names = {"first": first.name, "second": second.name}
    if edited := [run.name for run in (first, second) if run.edited]:
        return "unknown", ("prompts_edited", {"runs": ", ".join(edited)})
    one, other = _prompts(first), _prompts(second)
    steps = sorted(step for step in one if step in other)
    if not steps:
        return "unknown", ("prompts_unknown", names)
    different = [step for step in steps if one[step] != other[step]]
    if different:
        counts = {"step": int(different[0]), "count": len(different), "steps": len(steps)}
        return "differs", ("prompts_differ", names | counts)
    return "same", ("prompts_same", names | {"steps": len(steps)})


def _prompts(run: Run) -> dict[float, str]:
    digests = run.columns.get("prompts")
    return {step: text for step, text in zip(run.columns["step"], digests, strict=True) if text} if digests else {}


# Time and memory


class Cost(NamedTuple):
    """Means a step in seconds (None: not recorded), and totals of a run."""

    phases: dict[str, float | None]
    other: float | None
    step: float | None
    training_seconds: float | None
    run_seconds: float | None
    evaluation_seconds: float | None
    tokens: float | None
    tokens_per_second: float | None
    memory_gib: float | None

    @property
    def total_seconds(self) -> float | None:
        """Training and evaluation, start to end; None where one of them is not known."""
        if self.run_seconds is None or self.evaluation_seconds is None:
            return None
        return self.run_seconds + self.evaluation_seconds


def cost(run: Run) -> Cost:
    """Where a run's time and memory went; `other` is the part of a step that no phase accounts for."""
    phases = {name: _mean(run.known(name)) for name in PHASES}
    step = _mean(run.known("seconds_step"))
    accounted = sum(value for value in phases.values() if value is not None)
    tokens = run.known("tokens")
    seconds = run.known("seconds_step")
    clock = run.known("seconds")
    complete = bool(tokens) and len(tokens) == len(seconds) and sum(seconds) > 0
    return Cost(
        phases=phases,
        other=None if step is None or all(value is None for value in phases.values()) else max(step - accounted, 0.0),
        step=step,
        training_seconds=clock[-1] if clock else None,
        run_seconds=_number(run.manifest.get("seconds")),
        evaluation_seconds=_number(run.evaluation.get("seconds")),
        tokens=sum(tokens) if tokens else None,
        tokens_per_second=sum(tokens) / sum(seconds) if complete else None,
        memory_gib=max(run.known("memory_gib"), default=None),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


class Memory(NamedTuple):
    """A part of the memory of a run (GiB): what was predicted before it began, and what was measured."""

    part: str
    predicted: list[float | None]
    measured: list[float | None]


def memory(runs: Sequence[Run]) -> list[Memory]:
    """The memory ledgers of the manifests, side by side; empty where no run keeps one."""
    ledgers = []
    for run in runs:
        ledger = run.manifest.get("memory")
        sides = [ledger.get(side) if isinstance(ledger, dict) else None for side in ("predicted", "measured")]
        ledgers.append([side if isinstance(side, dict) else {} for side in sides])
    parts = dict.fromkeys(part for sides in ledgers for side in sides for part in side)
    return [Memory(part, *([_number(sides[i].get(part)) for sides in ledgers] for i in (0, 1))) for part in parts]
