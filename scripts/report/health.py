"""Whether a run was sound: what its metrics show to be wrong, with the numbers that show it. The wording is elsewhere.

Single steps are noisy, so a run is judged by fifths: the last fifth of its steps against the first. That something rose
rests on Kendall's rank correlation with the steps; that accuracy did not, on Welch's interval for its change as well.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd
from scipy.stats import kendalltau, ttest_ind

from scripts.report.read import Run
from scripts.smoke import GROWTH, LARGEST_DIFFERENCE, RATIO_BANDS, SMALLEST_DIFFERENCE

STEPS_TO_JUDGE = 10  # fewer leave less than two steps a fifth
# Between faults and healthy runs lie wide gaps. Figures of demo and GSM8K runs are measured.
CORRECTED = 0.2  # share of tokens or sequences; a sound bf16 engine leaves nearly all of them alone
COLLAPSED = 0.95  # share of groups without a gradient; 0.5 at the end of a demo run, where 88 % are right
SKIPPED = 0.1  # share of steps
TRUNCATED = 0.5  # share of completions; 0.04 in a GSM8K run
PADDED = 1.25  # times the length at the start; 1.2 in demo runs, which learn to write the second step
FARMED = 0.02  # reward a completion that is not for right answers
KL_LARGEST = 0.5  # nats a token: everything sampled is on average e^0.5 = 1.6 times as likely as at the start
ENTROPY_GROWTH, ENTROPY_RISE = 2.0, 0.3  # times the start, and nats above it; at most 1.2 times in GSM8K runs
ENTROPY_LEFT = 0.1  # of the start; 0.55 at the end of the same run
MOVED = 0.5  # share of the weights that an update changes; 0.9999 in demo runs with fp32 weights, 0.13 with bf16
MASTERED = 0.9  # accuracy from which there is little room to rise
STALLED = 0.02  # accuracy: less of a rise than this is none, if its interval holds 0 too

Values = dict[str, Any]  # what a verdict's sentence fills in; a name that ends in _share is a share


class Finding(NamedTuple):
    """A check that did not pass. Grave: the run's numbers cannot be trusted; otherwise something to look at."""

    name: str
    grave: bool
    values: Values


class Check(NamedTuple):
    """Looks at columns that the run must have for it; gives the evidence, or None where all is well."""

    name: str
    columns: tuple[str, ...]
    grave: bool
    judge: Callable[[Run], Values | None]
    steps: int = STEPS_TO_JUDGE


class Health(NamedTuple):
    findings: list[Finding]
    passed: list[str]
    unchecked: list[str]  # a column is missing, or has too few values


def examine(run: Run) -> Health:
    """All checks on one run."""
    health = Health([], [], [])
    if run.edited:
        return health  # sound or not, the numbers are no longer the run's
    for check in CHECKS:
        if not run.steps or any(len(run.known(column)) < check.steps for column in check.columns):
            health.unchecked.append(check.name)
        elif evidence := check.judge(run):
            health.findings.append(Finding(check.name, check.grave, evidence))
        else:
            health.passed.append(check.name)
    return health


# What the checks rest on


def fifths(values: Sequence[float]) -> tuple[pd.Series, pd.Series]:
    """The first and the last fifth."""
    series = pd.Series(values)
    fifth = max(1, len(series) // 5)
    return series.head(fifth), series.tail(fifth)


def levels(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the two fifths: a spike in a single step is no level."""
    first, last = fifths(values)
    return first.median(), last.median()


def means(values: Sequence[float]) -> tuple[float, float]:
    first, last = fifths(values)
    return first.mean(), last.mean()


def rises(values: Sequence[float]) -> bool:
    return bool(kendalltau(range(len(values)), values, alternative="greater").pvalue < 0.01)


def stalled(run: Run) -> Values | None:
    """How accuracy changed, if it did not rise and has room to."""
    first, last = (part.round(9) for part in fifths(run.known("accuracy")))
    rise = last.mean() - first.mean()
    low = high = rise
    if first.nunique() > 1 or last.nunique() > 1:
        low, high = ttest_ind(last, first, equal_var=False).confidence_interval(0.95)
    if rise >= STALLED or low > 0 or last.mean() >= MASTERED or rises(run.known("accuracy")):
        return None
    return {
        "accuracy_first_share": first.mean(),
        "accuracy_last_share": last.mean(),
        "low_points": low,
        "high_points": high,
    }


def of_updates(run: Run, column: str) -> list[float]:
    """The values of the steps that were not skipped."""
    skipped = run.columns.get("skipped") or [None] * run.steps
    return [
        value for value, skip in zip(run.columns[column], skipped, strict=True) if isinstance(value, float) and not skip
    ]


# The checks


def not_finite(run: Run) -> Values | None:
    if not run.not_finite:
        return None
    return {"columns": list(run.not_finite), "step": int(min(run.not_finite.values()))}


def engine(run: Run) -> Values | None:
    first, last = levels(run.known("logprob_difference"))
    if max(first, last) > LARGEST_DIFFERENCE or last > max(GROWTH * first, SMALLEST_DIFFERENCE):
        return {"first": first, "last": last, "limit": LARGEST_DIFFERENCE, "growth": GROWTH}
    return None


def leaves_one(column: str) -> Callable[[Run], Values | None]:
    def judge(run: Run) -> Values | None:
        middle, band = pd.Series(run.known(column)).median(), RATIO_BANDS[column]
        return {"middle": middle, "low": 1 - band, "high": 1 + band} if abs(middle - 1) > band else None

    return judge


def corrected(run: Run) -> Values | None:
    share = pd.Series(run.known("corrected_share")).mean()
    return {"mean_share": share} if share > CORRECTED else None


def degenerate(run: Run) -> Values | None:
    (_, groups), (_, spread), (_, accuracy) = (means(run.known(column)) for column in LEARNING)
    if groups < COLLAPSED and spread > 1e-3:
        return None
    return {"groups_share": groups, "spread": spread, "accuracy_share": accuracy}


def collapsed(run: Run) -> Values | None:
    values = degenerate(run)
    return values if values and values["accuracy_share"] < MASTERED else None


def mastered(run: Run) -> Values | None:
    values = degenerate(run)
    return values if values and values["accuracy_share"] >= MASTERED else None


def skipped(run: Run) -> Values | None:
    steps = run.known("skipped")
    return {"count": int(sum(steps)), "steps": len(steps)} if sum(steps) > SKIPPED * len(steps) else None


def truncated(run: Run) -> Values | None:
    first, last = means(run.known("truncated_share"))
    return {"first_share": first, "last_share": last} if last >= TRUNCATED else None


def padding(run: Run) -> Values | None:
    lengths = run.known("completion_length_mean")
    first, last = means(lengths)
    if last < PADDED * first or not rises(lengths) or not (accuracy := stalled(run)):
        return None
    return {"first": first, "last": last, **accuracy}


def farming(run: Run) -> Values | None:
    """Reward that is not for right answers rises, and accuracy does not."""
    reward = pd.Series(run.columns["reward"], dtype=float)
    right = pd.Series(run.columns.get("reward_correct", [0.0] * len(reward)), dtype=float)
    other = (reward - right.fillna(0.0)).dropna().tolist()
    first, last = means(other)
    if last - first < FARMED or not rises(other) or not (accuracy := stalled(run)):
        return None
    return {"first": first, "last": last, **accuracy}


def kl_runs_away(run: Run) -> Values | None:
    first, last = levels(run.known("kl"))
    return {"first": first, "last": last, "limit": KL_LARGEST} if last > KL_LARGEST else None


def entropy_runs_away(run: Run) -> Values | None:
    first, last = levels(run.known("entropy"))
    return {"first": first, "last": last} if last > max(ENTROPY_GROWTH * first, first + ENTROPY_RISE) else None


def entropy_gone(run: Run) -> Values | None:
    first, last = levels(run.known("entropy"))
    _, accuracy = means(run.known("accuracy"))
    if last < ENTROPY_LEFT * first and accuracy < MASTERED:
        return {"first": first, "last": last, "accuracy_share": accuracy}
    return None


def weights_stay(run: Run) -> Values | None:
    moved = pd.Series(of_updates(run, "weights_moved")).median()
    return {"moved_share": moved} if moved < MOVED else None


def no_gradient(run: Run) -> Values | None:
    _, last = fifths(of_updates(run, "grad_norm"))
    if len(last) and (last == 0).all() and not (run.known("degenerate_groups") and degenerate(run)):
        return {"steps": len(last)}
    return None


def bad_rewards(run: Run) -> Values | None:
    counts = run.known("bad_rewards")
    return {"count": int(sum(counts)), "steps": sum(count > 0 for count in counts)} if sum(counts) else None


LEARNING: tuple[str, ...] = ("degenerate_groups", "advantage_std", "accuracy")
CHECKS: Sequence[Check] = (
    Check("not_finite", (), True, not_finite),
    Check("engine", ("logprob_difference",), True, engine),
    Check("ratio", ("ratio_mean",), True, leaves_one("ratio_mean")),
    Check("correction", ("correction_mean",), True, leaves_one("correction_mean")),
    Check("corrected", ("corrected_share",), False, corrected),
    Check("collapsed", LEARNING, True, collapsed),
    Check("mastered", LEARNING, False, mastered),
    Check("skipped", ("skipped",), False, skipped),
    Check("truncated", ("truncated_share",), True, truncated),
    Check("padding", ("completion_length_mean", "accuracy"), False, padding),
    Check("farming", ("reward", "accuracy"), False, farming),
    Check("kl", ("kl",), True, kl_runs_away),
    Check("entropy_up", ("entropy",), True, entropy_runs_away),
    Check("entropy_gone", ("entropy", "accuracy"), False, entropy_gone),
    Check("weights", ("weights_moved",), True, weights_stay),
    Check("gradient", ("grad_norm",), True, no_gradient),
    Check("bad_rewards", ("bad_rewards",), False, bad_rewards, steps=1),
)
