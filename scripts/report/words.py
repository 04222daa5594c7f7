"""Every sentence of the page: one dictionary a language, and the functions that choose among its sentences."""

import math
from collections.abc import Sequence
from typing import Any

from scripts.report.compare import MISSING, SIGNIFICANT, Paired, gain, step_seconds
from scripts.report.read import Run

# Curves in the order of the page: section -> columns of metrics.csv. Each has a title and a sentence in the dictionary.
CURVES = {
    "learned": ("reward", "reward_correct", "reward_format", "accuracy", "validation_accuracy"),
    "completions": ("completion_length_mean", "completion_length_max", "truncated_share", "entropy"),
    "follows": ("logprob_difference", "correction_mean", "ratio_mean", "kl", "clip_fraction"),
    "update": ("grad_norm", "advantage_std", "degenerate_groups", "loss", "learning_rate"),
}

ENGLISH = {
    "lang": "en",
    "title": "GRPO: {runs}",
    "kicker": "The same GRPO run, compared",
    # The answer
    "raised": "raised accuracy from {before} to {after}",
    "lowered": "lowered accuracy from {before} to {after}",
    "unchanged": "left accuracy where it was ({before}, now {after})",
    "reached": "{run} answers {after} correctly; without a baseline evaluation nobody can say what training changed",
    "headline_gain": "GRPO {gains} on {rows} held-out problems",
    "headline_none": "No run has been evaluated yet, so there is no answer to give",
    "and": " and ",
    "comma": ", ",
    "semicolon": "; ",
    "stop": ".",
    "named": "{value} ({run})",
    "agree": "the runs agree (McNemar p {p}; {second} minus {first}: {difference}, 95 % interval {low} to {high})",
    "disagree": "the runs do not agree: {better} is better (McNemar p {p}; {second} minus {first}: {difference}, "
    "95 % interval {low} to {high})",
    "agree_all": "the {count} runs agree with each other (smallest McNemar p of {pairs} pairs, corrected for their number, {p})",
    "disagree_all": "the runs do not all agree: {pairs} (McNemar, p corrected for the number of pairs)",
    "disagree_pair": "{better} beats {worse}, p {p}",
    "paired_on": " (paired on the {count} problems that both answered)",
    "slower": "{slow} took {times}x as long a step as {fast} (median {slow_seconds} against {fast_seconds})",
    "equal_time": "a step took both runs the same time (median {seconds})",
    "points": "{value} points",
    "note_run": "{run}: {what}",
    "note_baseline": "The baseline is missing, so gains cannot be stated: {what}",
    "note_unfinished": "has not finished: {steps} of {planned} steps are recorded",
    "note_unfinished_unknown": "has not finished: {steps} steps are recorded, and no manifest says how many were planned",
    "note_not_started": "has recorded no step",
    "note_one_run": "Only one run is on this page, so there is nothing to compare it with.",
    "note_rows": "The evaluations cover different numbers of problems ({rows}); compare the paired tables, not the percentages.",
    "note_demo": "This is the demo. Its half-million-parameter model was warm-started on worked answers of which a share was "
    "deliberately cut after the first step, and what GRPO does here is unlearn that planted habit. The gain shows that the "
    "loop works, not that a model learned arithmetic.",
    "fault_no_folder": "{folder} does not exist; the run has not been started or its name is misspelt",
    "fault_missing": "{file} is missing",
    "fault_unreadable": "{file} cannot be read ({error})",
    "fault_lines": "{count} lines of {file} are incomplete and were left out",
    "fault_no_rows": "{file} holds no step yet",
    "fault_columns": "{file} lacks the columns {columns}",
    "fault_not_finite": "{file} holds nan or infinite values in {columns} (gaps in the curves)",
    # Controls
    "controls": "Controls for every figure",
    "runs": "Runs",
    "axis": "Axis",
    "axis_step": "Step",
    "axis_completions": "Completions",
    "axis_seconds": "Wall-clock",
    "axis_title_step": "optimizer step",
    "axis_title_completions": "completions sampled",
    "axis_title_seconds": "seconds since training began",
    "smoothing": "Smoothing",
    "smoothing_steps": "{count} steps",
    "smoothing_off": "off",
    "without_script": "The curves and the completions browser need JavaScript; the tables hold the same results.",
    "skip": "Skip to the results",
    # Evaluation
    "evaluation": "Evaluation",
    "evaluation_text": "Greedy answers to the whole test set, graded twice: flexible takes the answer wherever it stands, strict only "
    "from a final #### line. Whiskers and ranges are 95 % Wilson intervals.",
    "evaluation_figure": "Accuracy of the baseline and of each run with 95 % intervals; a gain is real where the interval of "
    "a run lies clear of the baseline's.",
    "run": "Run",
    "flexible": "flexible",
    "strict": "strict",
    "gain": "Gain",
    "truncated": "Truncated",
    "length": "Mean length",
    "tokens_unit": "{count} tokens",
    "right_of": "{correct} of {rows}",
    "interval": "{low} to {high}",
    "not_evaluated": "not evaluated",
    "paired": "The same problems, paired",
    "paired_text": "Percentages hide which problems were solved. Only problems that exactly one side got right tell the two apart; "
    "McNemar's exact test asks whether they fall to one side more often than coin tosses would.",
    "paired_none": "There are no two sets of completions to pair.",
    "pair": "First and second",
    "versus": "{first} and {second}",
    "both_right": "Both right",
    "only_first": "Only the first",
    "only_second": "Only the second",
    "both_wrong": "Both wrong",
    "difference": "Second minus first",
    "p_value": "McNemar p",
    "says": "In words",
    "says_agree": "no difference found",
    "says_better": "{run} is better",
    # Curves
    "curves": "Curves",
    "curves_text": "Faint: each step as recorded. Strong: the mean over the smoothing window around it. A gap is a value that was not "
    "recorded. Drag to zoom, double-click to go back.",
    "learned": "Did it learn?",
    "completions": "What the completions look like",
    "follows": "Does the policy stay near what sampled?",
    "update": "What the optimizer saw",
    "curves_none": "No run has recorded a step yet.",
    "first_last": "{first} → {last}",
    "first_last_label": "first and last tenth of the run:",
    "not_recorded": "{runs} does not record this",
    "nobody_records": "Not shown, because no run records it: {columns}.",
    "alternative": "{title} over training. {values}. {caption}",
    "alternative_run": "{run}: from {first} to {last}",
    # Why they differ
    "why": "Why they differ, or do not",
    "places": "The three places to look first",
    "places_text": "When two GRPO loops part, it is mostly in one of these. The values were read off the finished objects of each run.",
    "place": "Place",
    "verdict": "Verdict",
    "place_batch": "Batch semantics",
    "place_loss": "Loss type and normalisation",
    "place_correction": "Importance correction",
    "verdict_same": "same",
    "verdict_asked": "differs, as asked",
    "verdict_differs": "differs",
    "verdict_unknown": "cannot tell",
    "verdict_alone": "one value only",
    "verdict_single": "needs two runs",
    "check_not_said": "{runs} does not say its {setting}",
    "check_differs": "{setting} differs",
    "prompts_same": "{first} and {second} trained on the same prompts in each of {steps} steps",
    "prompts_differ": "{first} and {second} saw different prompts in {count} of {steps} steps, first in step {step}",
    "prompts_unknown": "{first} and {second} have no step in which both recorded their prompts",
    "settings": "Settings",
    "settings_text": "What each run really used. A difference that was not asked for comes first.",
    "settings_none": "No run has a manifest, so its settings are not known.",
    "setting": "Setting (scratch name)",
    "trl_name": "TRL name",
    "not_as_asked": "asked for {value}",
    "unknown": "not said",
    "none": "none",
    "yes": "yes",
    "no": "no",
    "settings_sum": "{same} settings are the same, {asked} differ as asked, {differs} differ without being asked to.",
    "settings_sum_one": "{count} settings; with one run there is nothing to hold them against.",
    # Cost
    "cost": "Where the time and memory went",
    "cost_text": "Mean seconds of an optimizer step by phase.",
    "cost_figure": "Mean seconds a step, stacked by phase; healthy is a step in which rollout and training take nearly all of it, and "
    "two runs whose bars are alike.",
    "seconds_rollout": "rollout",
    "seconds_reward": "reward",
    "seconds_train": "train",
    "seconds_push": "push",
    "other": "other",
    "step": "Step",
    "tokens_per_second": "Tokens a second",
    "tokens": "Completion tokens",
    "training": "Training loop",
    "whole_run": "Whole run",
    "memory": "Peak memory",
    "not_recorded_short": "not recorded",
    # Completions
    "browser": "Completions",
    "browser_text": "The same test problem before and after training, side by side.",
    "browser_all": "All {count} test problems are here.",
    "browser_sample": "Here are {count} of {total} test problems, evenly spaced, so that the page stays small.",
    "browser_none": "No completions were found.",
    "browser_old": "This browser cannot unpack the completions (it lacks DecompressionStream).",
    "browser_loading": "Unpacking the completions",
    "show": "Show",
    "filter_all": "all",
    "filter_fixed": "fixed by training",
    "filter_broken": "broken by training",
    "filter_disagree": "runs disagree",
    "filter_truncated": "truncated",
    "filter_wrong": "wrong everywhere",
    "search": "Question holds",
    "previous": "Previous",
    "next": "Next",
    "range": "{first} to {last} of {count}",
    "range_empty": "No problem fits.",
    "gold": "Right answer: {gold}",
    "right": "right",
    "wrong": "wrong",
    "not_strict": "not in the strict form",
    "answer_found": "answer {answer} (found by: {kind})",
    "answer_none": "no answer found",
    "no_completion": "no completion",
    "cut": "[{count} more characters]",
    # Provenance
    "provenance": "Provenance",
    "provenance_text": "Enough to make this page again.",
    "command": "Command",
    "make_page": "This page is made by",
    "what": "What",
    "trainer": "Trainer",
    "seed": "Seed",
    "model": "Model",
    "commit": "Commit",
    "code_digest": "Code digest",
    "data_digest": "Data digest",
    "hardware": "Hardware",
    "started": "Started",
    "finished": "Finished",
    "duration": "Duration",
    "status": "Status",
    "status_finished": "finished, {steps} steps",
    "version": "{package}",
    "engine": "Evaluation engine",
    "evaluation_seconds": "Evaluation took",
    # Figures: what it is, and what healthy looks like
    "reward.title": "Reward",
    "reward.text": "Mean total reward of the step's completions; healthy is a rise that levels off, alike in all runs.",
    "reward_correct.title": "Reward for the right answer",
    "reward_correct.text": "The weighted part paid for correctness; healthy is that it carries most of the rise of the reward.",
    "reward_format.title": "Reward for the format",
    "reward_format.text": "The weighted part paid for one final #### line; a rise here while accuracy is flat is format farming.",
    "accuracy.title": "Training accuracy",
    "accuracy.text": "Share of the step's completions graded right; it jumps, because every step has other problems, and should rise "
    "under the jumps.",
    "validation_accuracy.title": "Validation accuracy",
    "validation_accuracy.text": "Accuracy on problems that are never trained on; healthy is a rise along with training accuracy.",
    "completion_length_mean.title": "Completion length, mean",
    "completion_length_mean.text": "Tokens a completion; healthy is steady or slowly moving, while growth without accuracy is padding.",
    "completion_length_max.title": "Completion length, longest",
    "completion_length_max.text": "Tokens of the longest completion of the step; when it sits at the limit, answers are being cut off.",
    "truncated_share.title": "Truncated completions",
    "truncated_share.text": "Share of completions cut at the token limit; healthy is near zero or falling.",
    "entropy.title": "Entropy",
    "entropy.text": "Mean entropy of the next-token distribution in nats; a slow fall is healthy, a drop to zero ends exploration and a "
    "climb means that the policy is coming apart.",
    "logprob_difference.title": "Sampler against trainer",
    "logprob_difference.text": "Mean absolute difference of the log-probabilities that sampler and trainer give the sampled tokens; "
    "healthy is small and flat, growth means that the sampler no longer follows the trainer.",
    "correction_mean.title": "Importance correction",
    "correction_mean.text": "Mean weight, trainer over sampler, that corrects for sampling with another engine; healthy is very near 1.",
    "ratio_mean.title": "Importance ratio of the update",
    "ratio_mean.text": "Mean ratio of the new to the old probability of the sampled tokens; healthy is very near 1.",
    "kl.title": "KL to the reference",
    "kl.text": "Estimated divergence from the reference policy; healthy is slow growth to a small value (no curve without a reference).",
    "clip_fraction.title": "Clipped share",
    "clip_fraction.text": "Share of tokens whose ratio left the clip bounds; zero when each batch is used for one update, otherwise small.",
    "grad_norm.title": "Gradient norm",
    "grad_norm.text": "Norm of the gradient before clipping; healthy is the same order of magnitude throughout, never zero for long.",
    "advantage_std.title": "Spread of advantages",
    "advantage_std.text": "Standard deviation of the step's advantages; at zero there is nothing to learn from.",
    "degenerate_groups.title": "Groups that teach nothing",
    "degenerate_groups.text": "Share of groups whose completions all earned the same; it rises as problems are mastered, and near one "
    "learning stops.",
    "loss.title": "Loss",
    "loss.text": "The GRPO loss; its level says nothing about quality, and healthy is a band around zero without lasting spikes.",
    "learning_rate.title": "Learning rate",
    "learning_rate.text": "The schedule as applied; healthy is one line on top of the other.",
}

LANGUAGES = {"en": ENGLISH}


def texts(language: str) -> dict[str, str]:
    """The dictionary of a language; ValueError names the languages there are."""
    if language not in LANGUAGES:
        raise ValueError(f"report.language: {language!r} is not written yet; use one of: {', '.join(LANGUAGES)}")
    return LANGUAGES[language]


# Numbers


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def p_value(p: float) -> str:
    """As it reads after "p": two digits, and honest about very small ones."""
    if p < 0.001:
        return "< 0.001"
    return f"= {p:.2f}" if p >= 0.0095 else f"= {p:.3f}"


def points(share: float, t: dict[str, str]) -> str:
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


def setting(value: Any, t: dict[str, str]) -> str:
    """A setting's value as a person would write it."""
    if value is MISSING:
        return t["unknown"]
    if value is None:
        return t["none"]
    if isinstance(value, bool):
        return t["yes"] if value else t["no"]
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting(part, t)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(setting(part, t) for part in value)
    return str(value)


# The headline


def headline(baseline: Run, runs: Sequence[Run], pairs: Sequence[tuple[int, int, Paired]], t: dict[str, str]) -> list[str]:
    """The answer in sentences: what training did, whether the runs agree, what a step cost. `pairs` index into `runs`."""
    sentences = [_gains(baseline, runs, t), _agreement(runs, pairs, t), _speed(runs, t)]
    return [sentence[0].upper() + sentence[1:] + t["stop"] for sentence in sentences if sentence]


def _gains(baseline: Run, runs: Sequence[Run], t: dict[str, str]) -> str:
    scored = [run for run in runs if run.score("flexible")]
    if not scored:
        return t["headline_none"]
    before = baseline.score("flexible")
    if not before:
        reached = (t["reached"].format(run=run.name, after=percent(run.score("flexible")["accuracy"])) for run in scored[:1])
        rest = [t["named"].format(value=percent(run.score("flexible")["accuracy"]), run=run.name) for run in scored[1:]]
        return t["comma"].join([*reached, *rest])
    verdicts: dict[str, list[str]] = {}
    for run in scored:
        after = t["named"].format(value=percent(run.score("flexible")["accuracy"]), run=run.name)
        verdicts.setdefault(gain(baseline, run), []).append(after)
    gains = [
        t[verdict].format(before=percent(before["accuracy"]), after=listing(after, t)) for verdict, after in verdicts.items()
    ]
    rows = {run.evaluation.get("rows") for run in scored}
    return t["headline_gain"].format(gains=listing(gains, t), rows=number(max(row or 0 for row in rows)))


def _agreement(runs: Sequence[Run], pairs: Sequence[tuple[int, int, Paired]], t: dict[str, str]) -> str:
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
    # With several pairs one of them looks different by chance: each p is multiplied by their number (Bonferroni).
    corrected = [(first, second, table, min(1.0, table.p * len(pairs))) for first, second, table in pairs]
    parted = [entry for entry in corrected if entry[3] < SIGNIFICANT]
    if not parted:
        count = len({index for first, second, _ in pairs for index in (first, second)})
        return t["agree_all"].format(count=count, pairs=len(pairs), p=p_value(min(entry[3] for entry in corrected)))
    sentences = []
    for first, second, table, p in parted:
        better, worse = (second, first) if table.difference > 0 else (first, second)
        sentences.append(t["disagree_pair"].format(better=runs[better].name, worse=runs[worse].name, p=p_value(p)))
    return t["disagree_all"].format(pairs=t["semicolon"].join(sentences))


def _speed(runs: Sequence[Run], t: dict[str, str]) -> str:
    times = [(step, run.name) for run in runs if (step := step_seconds(run))]
    if len(times) < 2:
        return ""
    fast, slow = min(times), max(times)
    ratio = slow[0] / fast[0]
    if len(times) == 2 and f"{ratio:.1f}" == "1.0":
        return t["equal_time"].format(seconds=seconds(fast[0]))
    return t["slower"].format(
        slow=slow[1], fast=fast[1], times=f"{ratio:.1f}", slow_seconds=seconds(slow[0]), fast_seconds=seconds(fast[0])
    )


def listing(parts: Sequence[str], t: dict[str, str]) -> str:
    """a; a and b; a, b and c."""
    if len(parts) < 2:
        return "".join(parts)
    return t["comma"].join(parts[:-1]) + t["and"] + parts[-1]


# What is missing


def notes(baseline: Run, runs: Sequence[Run], t: dict[str, str]) -> list[str]:
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


def faults(run: Run, t: dict[str, str]) -> str:
    return t["semicolon"].join(t[key].format(**values) for key, values in run.faults)


def status(run: Run, t: dict[str, str]) -> str:
    if run.finished:
        return t["status_finished"].format(steps=run.steps)
    if not run.steps:
        return t["note_not_started"]
    if run.steps_planned is None:
        return t["note_unfinished_unknown"].format(steps=run.steps)
    return t["note_unfinished"].format(steps=run.steps, planned=run.steps_planned)
