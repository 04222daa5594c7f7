"""How the page says things: numbers as people write them, and which sentence of reports/<language>.toml fits."""

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.report.compare import (
    CHECKED,
    MISSING,
    SIGNIFICANT,
    Paired,
    corrected,
    gain,
    settings_rows,
    step_seconds,
    three_places,
)
from scripts.report.health import Finding
from scripts.report.read import Run

# Curves in the order of the page: section -> columns of metrics.csv. Their sentences: [figures] of the language.
CURVES = {
    "learned": ("reward", "reward_correct", "reward_format", "bad_rewards", "accuracy", "validation_accuracy"),
    "completions": ("completion_length_mean", "completion_length_max", "truncated_share", "entropy"),
    "follows": (
        *("logprob_difference", "kl_sampler", "sampler_ratio_max", "correction_mean", "corrected_share"),
        *("ratio_mean", "kl", "clip_fraction"),
    ),
    "update": (
        *("grad_norm", "weights_moved", "advantage_std", "degenerate_groups", "skipped", "loss", "learning_rate"),
    ),
}

SENTENCES = Path(__file__).parents[2] / "reports"
Texts = dict[str, Any]  # a language file: key -> sentence with {names} to fill in


def texts(language: str) -> Texts:
    """The sentences of a language, from reports/<language>.toml; ValueError names the languages there are."""
    languages = sorted(file.stem for file in SENTENCES.glob("*.toml"))
    if language not in languages:
        raise ValueError(f"report.language: {language!r} is not written yet; use one of: {', '.join(languages)}")
    return tomllib.loads((SENTENCES / f"{language}.toml").read_text(encoding="utf-8"))


# Numbers


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def p_value(p: float) -> str:
    """As it reads after "p": two digits, and honest about very small ones."""
    if p < 0.001:
        return "< 0.001"
    return f"= {p:.2f}" if p >= 0.0095 else f"= {p:.3f}"


def points(share: float, t: Texts) -> str:
    """A difference of two shares, in percentage points with its sign."""
    return t["points"].format(value=signed(100 * share))


def signed(value: float) -> str:
    text = f"{abs(value):.1f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else "\u2212") + text


def number(value: float | None) -> str:
    """Three to four digits that matter: 0.0512, 12.3, 1,319, 1e-06."""
    if value is None:
        return "\u2013"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("-", "\u2212")


def seconds(value: float | None) -> str:
    """0.052 s, 3.4 s, 4 min 12 s, 2 h 5 min."""
    if value is None:
        return "\u2013"
    if value < 0.0005:
        return "0\u00a0s"
    if value < 0.1:
        return f"{value:.3f}\u00a0s"
    if value < 10:
        return f"{value:.2f}\u00a0s"
    if value < 60:
        return f"{value:.1f}\u00a0s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}\u00a0min {rest}\u00a0s"
    return f"{minutes // 60}\u00a0h {minutes % 60}\u00a0min"


def setting(value: Any, t: Texts) -> str:
    """A setting's value as a person would write it."""
    if value is MISSING:
        return t["unknown"]
    if value is None:
        return t["none"]
    if isinstance(value, bool):
        return t["yes"] if value else t["no"]
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting(part, t)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(setting(part, t) for part in value) or t["none"]
    return str(value)


# The headline


def headline(baseline: Run, runs: Sequence[Run], pairs: Sequence[tuple[int, int, Paired]], t: Texts) -> list[str]:
    """What training did, whether the runs agree and if not why, what a step cost: a sentence each.

    `pairs` index into `runs`.
    """
    sentences = [_gains(baseline, runs, t), _agreement(runs, pairs, t), _causes(runs, pairs, t), _speed(runs, t)]
    names = tuple(run.name for run in runs)  # keep their small letters
    return [(said if said.startswith(names) else said[0].upper() + said[1:]) + t["stop"] for said in sentences if said]


def _gains(baseline: Run, runs: Sequence[Run], t: Texts) -> str:
    scored = [run for run in runs if run.score("flexible")]
    if not scored:
        return t["headline_none"]
    before = baseline.score("flexible")
    if not before:
        return t["reached"].format(after=listing([_after(run, t) for run in scored], t))
    verdicts: dict[str, list[str]] = {}
    for run in scored:
        verdicts.setdefault(gain(baseline, run), []).append(_after(run, t))
    gains = [
        t[verdict].format(before=percent(before["accuracy"]), after=listing(after, t))
        for verdict, after in verdicts.items()
    ]
    rows = {run.evaluation.get("rows") for run in scored}
    return t["headline_gain"].format(gains=listing(gains, t), rows=number(max(row or 0 for row in rows)))


def _after(run: Run, t: Texts) -> str:
    return t["named"].format(value=percent(run.score("flexible")["accuracy"]), run=run.name)


def _agreement(runs: Sequence[Run], pairs: Sequence[tuple[int, int, Paired]], t: Texts) -> str:
    if len(pairs) == 1:
        first, second, table = pairs[0]
        names = {"first": runs[first].name, "second": runs[second].name, "p": p_value(table.p)}
        better = runs[second if table.difference > 0 else first].name
        sentence = t["agree" if table.p >= SIGNIFICANT else "disagree"].format(
            **names,
            better=better,
            difference=points(table.difference, t),
            low=signed(100 * table.low),
            high=signed(100 * table.high),
        )
        answered = [len(runs[index].samples) for index in (first, second)]
        return sentence + (t["paired_on"].format(count=table.questions) if table.questions < max(answered) else "")
    if not pairs:
        return ""
    chances = corrected(pairs)
    parted = [(*pair, p) for pair, p in zip(pairs, chances, strict=True) if p < SIGNIFICANT]
    if not parted:
        count = len({index for first, second, _ in pairs for index in (first, second)})
        return t["agree_all"].format(count=count, pairs=len(pairs), p=p_value(min(chances)))
    sentences = []
    for first, second, table, p in parted:
        worse, best = (first, second) if table.difference > 0 else (second, first)
        sentences.append(t["disagree_pair"].format(better=runs[best].name, worse=runs[worse].name, p=p_value(p)))
    return t["disagree_all"].format(pairs=t["semicolon"].join(sentences))


def _causes(runs: Sequence[Run], pairs: Sequence[tuple[int, int, Paired]], t: Texts) -> str:
    """What runs that do not agree did differently."""
    parted = sorted({i for (*pair, _), p in zip(pairs, corrected(pairs), strict=True) if p < SIGNIFICANT for i in pair})
    if not parted:
        return ""
    those = [runs[i] for i in parted]
    places = [t[f"place_{check.place}"] for check in three_places(those) if check.verdict == "differs"]
    in_places = {name for names in CHECKED.values() for name in names}
    settings = [row.setting for row in settings_rows(those) if row.verdict in ("differs", "asked")]
    different = places + [name for name in settings if name not in in_places]
    return t["causes"].format(what=listing(different, t)) if different else t["causes_none"]


def _speed(runs: Sequence[Run], t: Texts) -> str:
    times = [(step, run.name) for run in runs if not run.edited and (step := step_seconds(run))]
    if len(times) < 2:
        return ""
    fast, slow = min(times), max(times)
    ratio = slow[0] / fast[0]
    if f"{ratio:.1f}" == "1.0":
        return t["equal_time"].format(seconds=seconds(fast[0]))
    return t["slower"].format(
        slow=slow[1], fast=fast[1], times=f"{ratio:.1f}", slow_seconds=seconds(slow[0]), fast_seconds=seconds(fast[0])
    )


def listing(parts: Sequence[str], t: Texts) -> str:
    """a; a and b; a, b and c."""
    if len(parts) < 2:
        return "".join(parts)
    return t["comma"].join(parts[:-1]) + t["and"] + parts[-1]


# What is missing


def notes(baseline: Run, runs: Sequence[Run], t: Texts) -> list[str]:
    """What a reader must know before believing the page: what is missing, broken or unfinished."""
    said = []
    if baseline.faults:
        said.append(t["note_baseline"].format(what=faults(baseline, t)))
    for run in runs:
        parts = [status(run, t)] if not run.finished else []
        if run.faults:
            parts.append(faults(run, t))
        if parts:
            said.append(t["note_run"].format(run=run.name, what=t["semicolon"].join(parts)) + t["stop"])
    rows = {run.evaluation["rows"] for run in [baseline, *runs] if run.evaluation.get("rows")}
    if len(rows) > 1:
        said.append(t["note_rows"].format(rows=listing([number(row) for row in sorted(rows)], t)))
    if len(runs) == 1:
        said.append(t["note_one_run"])
    return said


def faults(run: Run, t: Texts) -> str:
    return t["semicolon"].join(t[key].format(**values) for key, values in run.faults)


def status(run: Run, t: Texts) -> str:
    if run.finished and run.edited:
        return t["status_edited"]
    if run.finished:
        return t["status_finished"].format(steps=run.steps)
    if not run.steps:
        return t["note_not_started"]
    if run.steps_planned is None:
        return t["note_unfinished_unknown"].format(steps=run.steps)
    return t["note_unfinished"].format(steps=run.steps, planned=run.steps_planned)


# Health


def finding(found: Finding, t: Texts) -> dict[str, str]:
    """A health verdict: what is wrong, and the numbers that show it."""
    said = t["verdicts"][found.name]
    values = {name: _evidence(name, value) for name, value in found.values.items()}
    return {"title": said["title"], "text": said["text"].format(**values)}


def _evidence(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if name.endswith("_share"):
        return percent(value)
    return signed(100 * value) if name.endswith("_points") else number(value)


def checked(names: Sequence[str], t: Texts) -> str:
    """What health checks looked at, by their short names."""
    return t["comma"].join(t["verdicts"][name]["checked"] for name in names)
