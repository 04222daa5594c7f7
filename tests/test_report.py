"""The page: what it says about made-up runs, and what its controls do in a real browser."""

import csv
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import smoke
from scripts.report import words
from scripts.report.compare import cost, paired, settings_rows, three_places
from scripts.report.health import CHECKS, examine
from scripts.report.page import COMPLETIONS_BYTES, EXPECTED, OPTIONAL, build
from scripts.report.read import Run, read_run
from scripts.report.words import p_value, texts

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "21 - 2 </script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'> {{ 7 * 7 }} &lt;b&gt;"
SETTINGS = {"smoothing": 9, "language": "en", "scale": "demo"}

# What TRL has no number for stays empty.
UNKNOWN_TO_TRL = {"ratio_mean", "seconds_reward", "logprob_difference"}


def write_metrics(folder: Path, seed: int, steps: int, unknown: set[str] = frozenset()) -> None:
    """A run that learns, with the raggedness of real ones: empty cells, validation every tenth step."""
    noise = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*EXPECTED, *sorted(OPTIONAL)], restval="")
        writer.writeheader()
        clock = 0.0
        for step in range(1, steps + 1):
            learned = 0.58 + 0.36 * (1 - math.exp(-4 * step / steps))
            accuracy = min(1.0, max(0.0, noise.gauss(learned, 0.05)))
            rollout, train = noise.gauss(0.31, 0.02), noise.gauss(0.17, 0.01)
            phases = {"rollout": rollout, "reward": 0.004, "train": train, "push": 0.013}
            clock += sum(phases.values()) + 0.02
            row = {
                "step": step,
                "seconds": clock,
                "reward": accuracy + 0.1 * learned,
                "reward_correct": accuracy,
                "reward_format": 0.1 * learned,
                "accuracy": accuracy,
                "validation_accuracy": learned if step % 10 == 0 else "",
                "advantage_std": noise.gauss(0.7, 0.05) * (1.2 - learned),
                "degenerate_groups": min(1.0, max(0.0, noise.gauss(learned - 0.2, 0.06))),
                "kl": "" if step == 7 else 0.02 * step / steps,
                "entropy": noise.gauss(0.3, 0.02) * (1.3 - learned),
                "clip_fraction": 0.0,
                "ratio_mean": 1.0,
                "logprob_difference": abs(noise.gauss(2e-4, 4e-5)) if step % 15 else "",
                "completion_length_mean": noise.gauss(24 + 3 * learned, 0.6),
                "completion_length_max": 40,
                "truncated_share": max(0.0, noise.gauss(0.03, 0.02)),
                "grad_norm": abs(noise.gauss(0.5, 0.1)),
                "learning_rate": 5e-5 * (1 - step / steps),
                "loss": noise.gauss(0, 0.004),
                "kl_sampler": abs(noise.gauss(2e-5, 4e-6)),
                "sampler_ratio_max": 1 + abs(noise.gauss(0.02, 0.004)),
                "corrected_share": 0.0,
                "weights_moved": min(1.0, noise.gauss(0.98, 0.005)),
                "bad_rewards": 0,
                "skipped": 0,
                "tokens": round(noise.gauss(3200, 80)),
                **{f"seconds_{name}": seconds for name, seconds in phases.items()},
                "seconds_step": sum(phases.values()) + 0.02,
                "memory_gib": 1.9,
                "prompts": hashlib.sha256(str(step).encode()).hexdigest()[:12],
            }
            writer.writerow({name: "" if name in unknown else value for name, value in row.items()})


def write_manifest(folder: Path, trainer: str, steps: int, **used: Any) -> None:
    asked = {
        "steps": steps,
        "prompts_per_step": 16,
        "group_size": 8,
        "max_completion_tokens": 40,
        "temperature": 1.0,
        "top_k": None,
        "learning_rate": 5e-5,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "seed": 17,
        "reward_weights": {"correct": 1.0, "format": 0.1},
    }
    derived = {"sequences_per_step": 128, "importance_correction": "none", "advantage_epsilon": 1e-4}
    sampler = {"sampler": "vllm" if trainer == "scratch" else "transformers"}
    names = {"group_size": "num_generations", "max_completion_tokens": "max_completion_length"}
    manifest = {
        "run": folder.name,
        "trainer": trainer,
        "settings": {"run": folder.name, "trainer": trainer, "grpo": asked},
        "used": {**asked, **derived, **sampler, **used},
        "used_as": names if trainer == "trl" else {},
        "model": {"source": "builtin", "name": "demo", "revision": None},
        "data_digest": "5d41402abc4b2a76b9719d911017c592",
        "code_digest": hashlib.sha256(trainer.encode()).hexdigest(),
        "commit": "43bd362c0ffee43bd362c0ffee43bd362c0ffee4",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "trl": "1.16.0"},
        "hardware": {"system": "Linux-x86_64", "threads": 2, "gpus": []},
        "started": "2026-01-05T10:00:00+00:00",
        "finished": "2026-01-05T10:00:48+00:00",
        "seconds": 47.9,
        "command": f"snakemake results/{folder.name}/metrics.csv",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_answers(folder: Path, grades: list[bool], completion: str = "13 + 8 = 21\n21 - 2 = 19\n#### 19") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "id": f"test-{i:05d}",
            "question": f"Tom has 13 marbles and buys {i} boxes. He gives 2 away. How many are left?",
            "gold": "19",
            "completion": completion if right else f"13 + 8 = {i}\n#### {i}",
            "answer": "19" if right else None,
            "kind": "hash",
            "correct": right,
            "strict": right,
            "truncated": i % 25 == 0,
            "tokens": 24,
        }
        for i, right in enumerate(grades)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    correct = sum(grades)
    share = correct / len(grades)
    half = 1.96 * math.sqrt(share * (1 - share) / len(grades))
    score = {"correct": correct, "accuracy": share, "low": max(0.0, share - half), "high": min(1.0, share + half)}
    evaluation = {
        "run": folder.name,
        "rows": len(grades),
        "flexible": score,
        "strict": score,
        "truncated": {"count": 8, "share": 0.04},
        "answer_kinds": {"hash": len(grades)},
        "completion_length_mean": 24.0,
        "seconds": 4.2,
        "engine": "vllm",
    }
    (folder / "eval.json").write_text(json.dumps(evaluation))


def write_run(folder: Path, trainer: str, grades: list[bool], seed: int = 1, steps: int = 80, **used: Any) -> None:
    write_metrics(folder, seed, steps, UNKNOWN_TO_TRL if trainer == "trl" else set())
    write_manifest(folder, trainer, steps, **used)
    write_answers(folder, grades)


def rewrite_metrics(file: Path, change: Callable[[dict[str, str]], dict[str, Any]]) -> None:
    """Changes every row; a column that the change leaves out is gone."""
    rows = [change(row) for row in csv.DictReader(file.open())]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def grades(*parts: tuple[int, bool]) -> list[bool]:
    return [right for count, right in parts for _ in range(count)]


def write_results(folder: Path) -> Path:
    """Baseline 78 of 200, scratch 190, trl 187: 7 only scratch, 4 only trl."""
    write_answers(folder / "baseline", grades((78, True), (122, False)))
    write_run(folder / "scratch", "scratch", grades((190, True), (10, False)), seed=1)
    write_run(folder / "trl", "trl", grades((183, True), (7, False), (4, True), (6, False)), seed=2)
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write_results(tmp_path / "results")


def page(results: Path, *names: str, **settings: Any) -> str:
    """The page with ordinary spaces, as a reader would quote it."""
    html = build(names or ("scratch", "trl"), results, {**SETTINGS, **settings}, "results/trl/report.html")
    return html.replace("\u00a0", " ")


# Numbers


def test_mcnemar_by_hand():
    # 7 against 4 of 11 discordant: two tails of a fair coin, 2 * (C(11,0)+...+C(11,4)) / 2^11 = 2 * 562 / 2048
    first = dict(enumerate(grades((183, True), (7, True), (4, False), (6, False))))
    second = dict(enumerate(grades((183, True), (7, False), (4, True), (6, False))))
    table = paired(first, second)
    assert (table.both, table.only_first, table.only_second, table.neither) == (183, 7, 4, 6)
    assert table.p == pytest.approx(2 * 562 / 2048)
    assert table.difference == pytest.approx(-3 / 200)
    # Agresti and Min: ((4.5 - 7.5) +- 1.96 sqrt(12 - 9/202)) / 202
    spread = 1.959964 * math.sqrt(12 - 9 / 202)
    assert (table.low, table.high) == pytest.approx(((-3 - spread) / 202, (-3 + spread) / 202), rel=1e-5)


def test_runs_that_agree_everywhere_have_p_one_and_runs_without_common_questions_no_table():
    assert paired({"a": True, "b": False}, {"a": True, "b": False}).p == 1.0
    assert paired({"a": True}, {"b": True}) is None


@pytest.mark.parametrize(("p", "said"), [(0.6123, "= 0.61"), (0.0042, "= 0.004"), (1e-9, "< 0.001"), (1.0, "= 1.00")])
def test_p_values_in_words(p: float, said: str):
    assert p_value(p) == said


def test_settings_tell_asked_differences_from_unasked_ones(results: Path):
    write_manifest(results / "trl", "trl", 80, loss_type="grpo", learning_rate=5.0000001e-5)
    runs = [read_run(results / name, EXPECTED) for name in ("scratch", "trl")]
    verdicts = {row.setting: row.verdict for row in settings_rows(runs)}
    assert verdicts["loss_type"] == "differs"
    assert verdicts["sampler"] == "differs"
    assert verdicts["learning_rate"] == "same"
    runs[1].asked["loss_type"] = "grpo"
    assert {row.setting: row.verdict for row in settings_rows(runs)}["loss_type"] == "asked"


def test_three_places(results: Path):
    runs = [read_run(results / name, EXPECTED) for name in ("scratch", "trl")]
    assert [check.verdict for check in three_places(runs)] == ["same", "same", "same"]
    runs[1].columns["prompts"][4] = "0" * 12
    runs[1].used["scale_rewards"] = "none"
    del runs[1].used["importance_correction"]
    batch, loss, correction = three_places(runs)
    counts = {"step": 5, "count": 1, "steps": 80}
    assert batch.details == [("prompts_differ", {"first": "scratch", "second": "trl", **counts})]
    assert [check.verdict for check in (batch, loss, correction)] == ["differs", "differs", "unknown"]


def test_time_of_a_step_is_accounted_for(results: Path):
    spent = cost(read_run(results / "scratch", EXPECTED))
    assert sum(spent.phases.values()) + spent.other == pytest.approx(spent.step)
    assert spent.other == pytest.approx(0.02, abs=1e-6)
    assert spent.tokens_per_second == pytest.approx(spent.tokens / (80 * spent.step))


def test_a_resumed_run_keeps_the_later_row_and_drops_a_torn_one(results: Path):
    file = results / "scratch" / "metrics.csv"
    lines = file.read_text().splitlines()
    again = lines[80].split(",")
    again[1] = "999.5"
    file.write_text("\n".join([*lines, ",".join(again), "81,12.3,0.9"]))
    run = read_run(results / "scratch", EXPECTED)
    assert run.steps == 80
    assert len(run.columns["reward"]) == 80
    assert ("fault_lines", {"file": "metrics.csv", "count": 1, "lines": "83"}) in run.faults
    assert ("fault_twice", {"file": "metrics.csv", "step": 80, "first": "81", "second": "82"}) in run.faults


# Words


def test_headline_says_what_happened(results: Path):
    html = page(results)
    gains = "GRPO raised accuracy from 39.0 % to 95.0 % (scratch) and 93.5 % (trl) on 200 held-out problems."
    agreement = (
        "The runs agree (McNemar p = 0.55; trl minus scratch: \u22121.5 points, 95 % interval \u22124.8 to +1.9)."
    )
    assert f"<h1>{gains}</h1>" in html
    assert agreement in html
    assert "deliberately cut after the first step" in html
    assert "deliberately cut" not in page(results, scale="full")


def test_headline_does_not_hide_a_disagreement_or_a_loss(results: Path):
    write_answers(results / "trl", grades((50, True), (150, False)))
    html = page(results)
    assert "raised accuracy from 39.0 % to 95.0 % (scratch) and lowered accuracy from 39.0 % to 25.0 % (trl)" in html
    assert "The runs do not agree: scratch is better (McNemar p &lt; 0.001;" in html


def test_a_gain_within_noise_is_not_called_a_gain(results: Path):
    write_answers(results / "trl", grades((80, True), (120, False)))
    assert "left accuracy where it was (39.0 %, now 40.0 % (trl))" in page(results)


def test_a_slow_run_is_named(results: Path):
    rewrite_metrics(results / "trl" / "metrics.csv", lambda row: row | {"seconds_step": "1.56"})
    assert "A trl step took 3.0x as long as a scratch step (median 1.56 s against 0.52 s)." in page(results)


def test_runs_that_part_are_told_what_they_did_differently(results: Path):
    write_answers(results / "trl", grades((150, True), (50, False)))
    write_manifest(results / "trl", "trl", 80, loss_type="grpo", temperature=0.7)
    html = page(results)
    assert "What they did differently: Loss type and normalisation, temperature and sampler." in html
    write_manifest(results / "trl", "trl", 80, sampler="vllm")
    assert "Nothing that they recorded differs, so the cause lies in chance" in page(results)
    assert "What they did differently" not in page(results, "scratch")


def test_a_run_keeps_the_small_letter_of_its_name(results: Path):
    rewrite_metrics(results / "trl" / "metrics.csv", lambda row: row | {"seconds_step": "1.56"})
    assert "trl 每步耗时是 scratch 的 3.0 倍" in page(results, language="zh")


# Health


def gsm8k_columns(seed: int, steps: int) -> dict[str, list[float]]:
    """A sound run as noisy as those on real GSM8K: accuracy from 25 to 37 %, 64 completions a step, a bf16 sampler."""
    noise = random.Random(seed)

    def around(first: float, last: float, spread: float, low: float = 0.0, high: float = math.inf) -> list[float]:
        slope = (last - first) / steps
        return [min(high, max(low, noise.gauss(first + slope * step, spread))) for step in range(steps)]

    accuracy = around(0.25, 0.37, 0.09, high=1.0)
    return {
        "step": [float(step + 1) for step in range(steps)],
        "reward": accuracy,
        "reward_correct": accuracy,
        "reward_format": [0.0] * steps,
        "accuracy": accuracy,
        "advantage_std": around(0.66, 0.66, 0.15),
        "degenerate_groups": around(0.5, 0.45, 0.22, high=1.0),
        "kl": around(0.0, 0.05, 0.003),
        "entropy": around(0.35, 0.3, 0.04),
        "clip_fraction": [0.0] * steps,
        "ratio_mean": [1.0] * steps,
        "correction_mean": around(1.0, 0.98, 0.06),
        "corrected_share": around(0.01, 0.01, 0.01, high=1.0),
        "logprob_difference": around(0.007, 0.007, 0.0006),
        "completion_length_mean": around(272, 287, 26),
        "truncated_share": around(0.035, 0.03, 0.02, high=1.0),
        "grad_norm": around(0.8, 0.8, 0.3, low=0.1),
        "weights_moved": around(0.98, 0.98, 0.005, high=1.0),
        "bad_rewards": [0.0] * steps,
        "skipped": [0.0] * steps,
    }


def line(first: float, last: float, steps: int = 60) -> list[float]:
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]


FLAT = {"accuracy": gsm8k_columns(5, 60)["degenerate_groups"]}  # noise about a level
FORMAT = line(0.0, 0.1)
FARMED = {"reward": [a + f for a, f in zip(FLAT["accuracy"], FORMAT, strict=True)], "reward_format": FORMAT}
AT_LAST = [0.0] * 40 + [1.0] * 20
# what is wrong with the metrics -> the check that says so, and words and numbers of its sentence
UNSOUND = {
    "never pushed, bf16 sampler": ({"logprob_difference": line(0.007, 0.06)}, "engine", "differ by 0.0551 nats"),
    "never pushed, fp32 sampler": ({"logprob_difference": line(1e-7, 0.002)}, "engine", "0.000187 early"),
    "other weights from the start": ({"logprob_difference": [0.4] * 60}, "engine", "sound is at most 0.05"),
    "old log-probs off": ({"ratio_mean": [1.3] * 60}, "ratio", "1.3 in the median step"),
    "importance weights off": ({"correction_mean": [0.2] * 60}, "correction", "between 0.5 and 1.5"),
    "correction masks half": ({"corrected_share": [0.5] * 60}, "corrected", "met 50.0 % of the tokens"),
    "no group with a difference": (
        {"degenerate_groups": AT_LAST, "advantage_std": [0.5] * 40 + [0.0] * 20, "grad_norm": [0.5] * 40 + [0.0] * 20},
        "collapsed",
        "100.0 % of the groups earned the same",
    ),
    "all solved": ({"degenerate_groups": AT_LAST, "accuracy": line(0.3, 1.0)}, "mastered", "completions were right"),
    "steps without a gradient": (
        {"skipped": [1.0, 1.0, 0.0] * 20, "weights_moved": [0.0, 0.0, 0.98] * 20, "grad_norm": [0.0, 0.0, 0.8] * 20},
        "skipped",
        "In 40 of 60 steps no completion had a gradient",
    ),
    "all cut off": ({"truncated_share": line(0.1, 1.0)}, "truncated", "91.6 % of the completions ran into"),
    "padding": ({"completion_length_mean": line(200, 400), **FLAT}, "padding", "went from 219 to 381 tokens"),
    "format farming": ({**FLAT, "reward_correct": FLAT["accuracy"], **FARMED}, "farming", "from 0.00932 to 0.0907"),
    "KL running away": ({"kl": line(0.0, 2.0)}, "kl", "1.81 nats a token away"),
    "entropy running away": ({"entropy": line(0.35, 3.0)}, "entropy_up", "to 2.75 nats"),
    "entropy used up": ({"entropy": [0.35] * 30 + [0.005] * 30}, "entropy_gone", "finds nothing new"),
    "bf16 weights": ({"weights_moved": [0.03] * 60}, "weights", "changed 3.0 % of the weights"),
    "loss cut off from the weights": ({"grad_norm": [0.5] * 40 + [0.0] * 20}, "gradient", "last 12 steps"),
    "reward that fails": ({"bad_rewards": [0.0] * 58 + [2.0, 1.0]}, "bad_rewards", "3 completions in 2 steps"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_run_is_told_what_is_wrong_and_nothing_else(case: str):
    changes, name, words_and_numbers = UNSOUND[case]
    [found] = examine(Run("scratch", gsm8k_columns(1, 60) | changes)).findings
    assert found.name == name
    assert words_and_numbers in words.finding(found, texts("en"))["text"].replace("\u00a0", " ")
    assert "{" not in words.finding(found, texts("zh"))["text"]


def test_every_check_is_shown_to_find_its_fault_and_has_its_words():
    assert {check.name for check in CHECKS} == {name for _, name, _ in UNSOUND.values()} | {"not_finite"}
    for language in ("en", "zh"):
        assert set(texts(language)["verdicts"]) == {check.name for check in CHECKS}


@pytest.mark.parametrize("steps", [20, 60, 200])
def test_nothing_is_said_about_sound_runs(steps: int):
    for seed in range(50):
        health = examine(Run("scratch", gsm8k_columns(seed, steps)))
        assert (health.findings, health.unchecked) == ([], []), seed


def test_the_page_of_sound_runs_says_so_and_what_it_could_not_check(results: Path):
    html = page(results)
    assert html.count('<span class="verdict same">nothing wrong found</span>') == 2
    assert "See Health" not in html
    assert "fewer than ten steps of it: sampler follows trainer, importance ratio, importance weights." in html


def break_metrics(file: Path) -> None:
    """All completions cut, and nothing finite from step 31."""
    broken = {"grad_norm": "nan", "loss": "-inf"}
    rewrite_metrics(file, lambda row: row | {"truncated_share": "1"} | (broken if int(row["step"]) >= 31 else {}))


def test_the_page_names_what_is_wrong_at_its_top_and_in_full_under_health(results: Path):
    break_metrics(results / "trl" / "metrics.csv")
    html = page(results)
    top = 'trl: Values that are no numbers · Completions are cut off <a href="#health">See Health</a>'
    assert top in html
    assert "nan or infinity in grad_norm, loss, first in step 31" in html
    assert "100.0 % of the completions ran into the token limit late in the run, 100.0 % early" in html
    assert '<span class="verdict differs">something is wrong</span>' in html


def test_a_run_of_a_few_steps_is_not_judged():
    health = examine(Run("scratch", gsm8k_columns(1, 9)))
    assert (health.findings, health.passed) == ([], ["not_finite", "bad_rewards"])
    assert examine(Run("scratch")).passed == []


# What is missing


def test_an_interrupted_run_is_called_unfinished(results: Path):
    interrupted(results)
    html = page(results)
    assert "trl: has not finished: 37 steps are recorded" in html
    assert "to 95.0 % (scratch) on 200" in html
    assert "eval.json is missing" in html


@pytest.mark.parametrize("content", ["", "step,reward\n", "step,reward\n1,\n", "\x00\xff garbage", "reward\n0.5\n"])
def test_metrics_without_numbers_make_a_page(results: Path, content: str):
    (results / "trl" / "metrics.csv").write_text(content)
    html = page(results)
    assert "trl: " in html
    assert "<h1>GRPO raised" in html


@pytest.mark.parametrize("content", ["", "{", "[]", '{"flexible": null, "settings": 3, "used": [], "versions": 1}'])
@pytest.mark.parametrize("name", ["manifest.json", "eval.json", "samples.jsonl"])
def test_broken_files_make_a_page(results: Path, name: str, content: str):
    (results / "trl" / name).write_text(content)
    assert "<h1>GRPO raised" in page(results)


def test_nothing_there_at_all(tmp_path: Path):
    html = page(tmp_path / "results")
    assert "No run has been evaluated yet" in html
    assert "results/trl does not exist" in html


def test_a_missing_column_is_named_and_the_figure_says_who_lacks_it(results: Path):
    write_metrics(results / "trl", 2, 80)
    rewrite_metrics(results / "trl" / "metrics.csv", lambda row: {name: row[name] for name in row if name != "entropy"})
    html = page(results)
    assert "metrics.csv lacks the columns entropy" in html
    assert "trl does not record this" in html


def in_line(number: int, change: Callable[[str], str]) -> Callable[[Path], None]:
    """Changes one line of a file, counted from 1 as editors do."""

    def damage(file: Path) -> None:
        lines = file.read_text().splitlines(keepends=True)
        lines[number - 1] = change(lines[number - 1])
        file.write_text("".join(lines))

    return damage


def in_cell(column: str, line: int, text: str) -> Callable[[Path], None]:
    return lambda file: rewrite_metrics(
        file, lambda row: row | ({column: text} if row["step"] == str(line - 1) else {})
    )


def without_column(name: str) -> Callable[[Path], None]:
    return lambda file: rewrite_metrics(file, lambda row: {key: row[key] for key in row if key != name})


def cut(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:39])[:-60])


# what was done to metrics.csv -> what the page says of the place; "" where only the run's digest can tell
DAMAGE = {
    "another number": (in_cell("reward", 6, "0.99"), ""),
    "a row less at the end": (in_line(81, lambda line: ""), ""),
    "text for a number": (in_cell("reward", 6, "good"), "metrics.csv, line 6, column reward: 'good' is no number"),
    "a decimal comma": (in_cell("loss", 7, "0,5"), "metrics.csv, line 7, column loss: '0,5' is no number"),
    "a number that no run has": (in_cell("tokens", 6, "1e308"), "line 6, column tokens: '1e308' is no number"),
    "a step without a number": (in_cell("step", 6, "inf"), "metrics.csv, line 6, column step: 'inf' is no number"),
    "a step too large": (in_cell("step", 6, "1e308"), "metrics.csv, line 6, column step: '1e308' is no number"),
    "a row twice": (in_line(6, lambda line: line * 2), "step 5 stands in line 6 and in line 7; the later one is shown"),
    "a column less": (without_column("entropy"), "metrics.csv lacks the columns entropy"),
    "no steps": (without_column("step"), "metrics.csv lacks the columns step"),
    "cut": (cut, "damaged lines of metrics.csv, left out: 1 (line 39)"),
    "a quotation mark": (
        in_line(6, lambda line: '"' + line + "1," * 99_999),
        "cannot be read from line 6 on (field larger",
    ),
    "nothing left": (lambda file: file.write_text(""), "metrics.csv holds no step yet"),
}


@pytest.mark.parametrize("recorded", [True, False], ids=["digest", "older manifest"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_done_to_metrics_after_the_run_is_said_with_its_place(results: Path, damage: str, recorded: bool):
    change, place = DAMAGE[damage]
    if recorded:
        record_digest(results / "trl")
    change(results / "trl" / "metrics.csv")
    html = page(results).replace("&#39;", "'")
    [said] = re.findall(r"<li>trl: (.*?)</li>", html) or [""]
    assert place in said
    assert said.startswith("metrics.csv is not the file that the run wrote (changed since); its curves") == recorded
    assert "<h1>GRPO raised accuracy from 39.0 % to 95.0 % (scratch) and 93.5 % (trl)" in html


def record_digest(folder: Path) -> None:
    """What a run adds to its manifest at its end."""
    file = folder / "manifest.json"
    digest = hashlib.sha256((folder / "metrics.csv").read_bytes()).hexdigest()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metrics_sha256": digest}))


def test_no_verdict_rests_on_edited_metrics_and_the_evaluation_stays(results: Path):
    for name in ("scratch", "trl"):
        record_digest(results / name)
    whole = page(results)
    assert "not the file that the run wrote" not in whole
    assert "A step took the runs the same time" in whole

    in_cell("reward", 6, "nan")(results / "scratch" / "metrics.csv")
    html = page(results).replace("&#39;", "'")
    path = (results / "scratch" / "metrics.csv").as_posix()
    assert (
        "<li>scratch: metrics.csv is not the file that the run wrote (changed since); its curves and times are shown "
        "as they stand now, and no verdict rests on them (accuracy and agreement come from the evaluation's own "
        f"files). To have the run's own: put a copy of it back, or delete {path} and this page and run the same "
        "command, which trains the run again; metrics.csv, line 6, column reward: 'nan' is no number that can be "
        "used.</li>"
    ) in html
    assert "The runs agree (McNemar p = 0.55; trl minus scratch" in html  # of samples.jsonl
    assert "step took" not in html
    assert html.count('<span class="verdict single">not judged</span>') == 1
    assert html.count("Not judged, because metrics.csv is not the file that the run wrote.") == 1
    assert html.count('<span class="verdict same">nothing wrong found</span>') == 1
    assert "whether the prompts were the same cannot be told: metrics.csv was changed since the run (scratch)" in html
    assert "finished; metrics.csv was changed since" in html


def test_edited_metrics_are_named_in_chinese(results: Path):
    record_digest(results / "trl")
    in_cell("reward", 6, "good")(results / "trl" / "metrics.csv")
    html = page(results, language="zh").replace("&#39;", "'")
    assert "trl：metrics.csv 不是该运行写下的文件（之后被改动过）；曲线和耗时按文件现状显示" in html
    assert "metrics.csv 第 6 行 reward 列：'good' 不是可用的数。" in html
    assert "不作判断，因为 metrics.csv 不是该运行写下的文件。" in html


def test_of_many_damaged_places_three_are_named(results: Path):
    rewrite_metrics(results / "trl" / "metrics.csv", lambda row: row | {"reward": "good"})
    html = page(results)
    assert re.findall(r"line (\d+), column reward", html) == ["2", "3", "4"]
    assert "more such places in metrics.csv: 77." in html


def test_smoke_does_not_judge_edited_metrics(results: Path, monkeypatch: pytest.MonkeyPatch):
    record_digest(results / "scratch")
    metrics = results / "scratch" / "metrics.csv"
    in_cell("reward", 6, "good")(metrics)
    monkeypatch.setattr(sys, "argv", ["smoke", str(metrics), "--out", str(results / "smoke.json")])
    with pytest.raises(SystemExit, match=f"smoke: {metrics} is not the file that the run wrote; delete it and run"):
        smoke.main()
    assert not (results / "smoke.json").exists()


def test_one_run_and_five(results: Path):
    assert "Only one run is on this page" in page(results, "scratch")
    for index in range(3):
        answers = grades((186 + index, True), (14 - index, False))
        write_run(results / f"scratch-{index}", "scratch", answers, seed=5 + index)
    html = page(results, "scratch", "trl", "scratch-0", "scratch-1", "scratch-2")
    assert "The 5 runs agree with each other (smallest McNemar p of 10 pairs" in html


def test_an_unknown_language_is_refused(results: Path):
    with pytest.raises(ValueError, match=r"report\.language: 'xx' is not written yet; use one of: en, zh"):
        page(results, language="xx")


# What an evaluation or a manifest may hold besides


def test_pass_at_k_and_majority(results: Path):
    assert "pass@" not in page(results)
    for name, share in (("baseline", 0.3), ("trl", 0.9)):
        file = results / name / "eval.json"
        majority = {"correct": 80, "accuracy": 0.4, "low": 0.33, "high": 0.47}
        passes = {"1": share, "2": share + 0.02, "4": share + 0.04, "8": share + 0.06, "oops": None}
        sampled = {"samples": 8, "temperature": 0.8, "pass_at_k": passes, "majority": majority}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"sampled": sampled}))
    html = re.sub(r"\s+", " ", page(results))
    assert 'pass@1</th><th scope="col">pass@2</th><th scope="col">pass@4</th><th scope="col">pass@8</th>' in html
    assert "trl<small>8 answers, temperature 0.8</small></th> <td>90.0 %</td><td>92.0 %</td><td>94.0 %</td>" in html
    assert "<td>40.0 %<small>33.0 % to 47.0 %</small></td>" in html


def test_memory_by_part(results: Path):
    assert "Memory by part" not in page(results)
    file = results / "scratch" / "manifest.json"
    ledger = {"predicted": {"weights": 2.2, "optimizer_state": 4.4}, "measured": {"weights": 2.25, "total": 9}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"memory": ledger}))
    html = page(results)
    said = re.findall(r">([^<]*) <small>measured</small></span><span class=\"line\">([^<]*) <small>predicted", html)
    nothing = ("–", "–")  # trl keeps no ledger
    assert said == [("2.25", "2.2"), nothing, ("–", "4.4"), nothing, ("9", "–"), nothing]
    assert "optimizer state</th>" in html


def test_columns_of_older_files_are_not_missed(results: Path):
    rewrite_metrics(
        results / "trl" / "metrics.csv", lambda row: {name: row[name] for name in row if name not in OPTIONAL}
    )
    html = page(results)
    assert "lacks the columns" not in html
    assert "Share of the weights that the step" in html  # scratch records it
    assert "Not shown, because it is 0 in every step: Failed rewards, Skipped steps." in html


# Size, time, bytes


def test_command_line_same_bytes_and_ten_seconds(results: Path):
    command = [sys.executable, "-m", "scripts.report", "--settings", json.dumps(SETTINGS), "--runs", "scratch", "trl"]
    outputs = [results / "trl" / name for name in ("a.html", "b.html")]
    began = time.perf_counter()
    for output in outputs:
        subprocess.run([*command, "--results", results, "--out", output], cwd=ROOT, check=True, capture_output=True)
        output.write_text(output.read_text(encoding="utf-8").replace(output.as_posix(), ""), encoding="utf-8")
    assert time.perf_counter() - began < 20
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_gsm8k_with_three_sets_of_long_completions_stays_under_8_mb(results: Path):
    noise = random.Random(0)
    words = ["".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randint(2, 9))) for _ in range(3000)]
    for name in ("baseline", "scratch", "trl"):
        write_answers(results / name, [noise.random() < 0.5 for _ in range(1319)])
        rows = [json.loads(line) for line in (results / name / "samples.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(row | {"completion": " ".join(noise.choices(words, k=320))}) + "\n" for row in rows)
        (results / name / "samples.jsonl").write_text(text)
    html = page(results)
    assert len(html.encode()) < 8_000_000
    assert "of 1,319 test problems, evenly spaced" in html  # random letters do not compress, so here it has to choose
    assert COMPLETIONS_BYTES < 3_000_000


def test_the_language_file_holds_no_sentence_that_the_page_never_says():
    files = [*(ROOT / "scripts" / "report").glob("*.py"), *(ROOT / "reports").glob("*.j*")]
    sources = "".join(file.read_text(encoding="utf-8") for file in files)
    composed = ("axis_", "section_", "place_", "verdict_", "filter_", "health_", "figures")
    for key in texts("en"):
        assert key.startswith(composed) or f'"{key}"' in sources or f"t.{key}" in sources, key


def test_languages_say_the_same_things_with_the_same_blanks():
    def blanks(sentences: dict[str, Any]) -> dict[str, Any]:
        return {
            key: blanks(said) if isinstance(said, dict) else sorted(re.findall(r"\{\w+\}", said))
            for key, said in sentences.items()
        }

    assert blanks(texts("zh")) == blanks(texts("en"))


def test_the_page_in_chinese(results: Path):
    html = page(results, language="zh")
    assert "在 200 道留出题上，GRPO 把准确率从 39.0 % 提高到 95.0 %（scratch）和 93.5 %（trl）。" in html
    assert '<html lang="zh">' in html


# In a real browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("no Chromium is installed")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One tab with the page, whose completions of trl are malicious; `complaints` collects errors and requests."""
    results = write_results(tmp_path_factory.mktemp("opened") / "results")
    write_answers(results / "trl", grades((183, True), (7, False), (4, True), (6, False)), completion=EVIL)
    file = results / "report.html"
    file.write_text(page(results), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1200, "height": 900})
    tab.complaints = []
    tab.on("console", lambda message: tab.complaints.append(message.text))
    tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.on("request", lambda request: tab.complaints.append(request.url) if request.url != file.as_uri() else None)
    tab.goto(file.as_uri())
    tab.wait_for_selector("#samples article")
    yield tab
    tab.close()


@pytest.fixture
def opened(tab: Any) -> Iterator[Any]:
    """The tab, as every test leaves it: all runs, axis step, smoothing 9, all problems; and without a complaint."""
    yield tab
    assert [complaint for complaint in tab.complaints if not complaint.startswith("data:")] == []


def no_results(results: Path) -> None:
    shutil.rmtree(results)


def interrupted(results: Path) -> None:
    for name in ("manifest.json", "eval.json", "samples.jsonl"):
        (results / "trl" / name).unlink()
    file = results / "trl" / "metrics.csv"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:38]))


def empty_metrics(results: Path) -> None:
    (results / "trl" / "metrics.csv").write_text("")


def few_columns(results: Path) -> None:
    keep = {"step", "reward", "seconds_step", "prompts"}
    rewrite_metrics(results / "trl" / "metrics.csv", lambda row: {name: row[name] for name in row if name in keep})


@pytest.mark.parametrize("damage", [no_results, interrupted, empty_metrics, few_columns])
def test_a_page_of_what_is_left_has_no_errors(browser: Any, results: Path, damage: Callable[[Path], None]):
    damage(results)
    file = results.parent / "report.html"
    file.write_text(page(results), encoding="utf-8")
    tab = browser.new_page()
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(file.as_uri())
    tab.locator("#legend").get_by_label("trl").uncheck()
    assert tab.get_by_role("columnheader", name="trl", exact=True).count() == 0
    assert complaints == []
    tab.close()


def lines(tab: Any, column: str) -> list[dict[str, Any]]:
    """What a figure draws: the strong lines as name, x and y."""
    script = """id => document.getElementById(id).data.filter(d => d.hoverinfo !== 'skip')
        .map(d => ({name: d.name, x: d.x, y: d.y}))"""
    return tab.evaluate(script, f"plot-{column}")


def test_a_completion_cannot_run_anything(opened: Any):
    assert opened.evaluate("window.stolen") is None
    assert opened.locator("#samples img, #samples script").count() == 0
    assert opened.locator("#samples pre").nth(2).inner_text() == EVIL


def test_curves_keep_gaps_and_axis_changes(opened: Any):
    scratch, _ = lines(opened, "kl")
    assert scratch["y"][6] is None
    assert scratch["x"][:3] == [1, 2, 3]
    opened.locator("#controls").get_by_label("Completions").check()
    assert lines(opened, "reward")[0]["x"][:3] == [128, 256, 384]
    opened.locator("#controls").get_by_label("Wall-clock").check()
    assert 0.4 < lines(opened, "reward")[0]["x"][0] < 0.7
    opened.locator("#controls").get_by_label("Step", exact=True).check()


def test_smoothing_changes_all_curves_and_1_is_the_raw_line(opened: Any):
    raw = opened.evaluate("page.runs[0].columns.reward")
    slider = opened.get_by_label("Smoothing")
    assert slider.input_value() == "9"
    smooth = lines(opened, "reward")[0]["y"]
    assert smooth[40] == pytest.approx(sum(raw[36:45]) / 9, rel=1e-4)
    slider.fill("1")
    assert lines(opened, "reward")[0]["y"] == pytest.approx(raw, rel=1e-4)
    assert opened.locator("#controls output").inner_text() == "off"
    slider.fill("9")


def test_legend_hides_a_run_everywhere(opened: Any):
    opened.locator("#legend").get_by_label("trl").uncheck()
    for column in ("reward", "entropy", "loss"):
        assert [line["name"] for line in lines(opened, column)] == ["scratch"]
    assert opened.evaluate("document.getElementById('plot-evaluation').data[0].y") == ["baseline", "scratch"]
    assert opened.evaluate("document.getElementById('plot-cost').data[0].y") == ["scratch"]
    assert opened.locator("#samples article").first.locator(".answer").count() == 2
    assert opened.get_by_role("columnheader", name="trl", exact=True).count() == 0
    assert opened.get_by_role("rowheader", name="baseline and trl").count() == 0
    assert opened.locator("#health").get_by_role("heading", name="trl").count() == 0
    opened.locator("#legend").get_by_label("trl").check()
    assert len(lines(opened, "reward")) == 2


def test_one_colour_a_run(opened: Any):
    script = """run => new Set(page.figures.flatMap(f => document.getElementById('plot-' + f.column).data)
        .filter(d => d.name === run).map(d => d.line.color)).size"""
    assert opened.evaluate(script, "scratch") == 1
    assert opened.evaluate("document.getElementById('plot-evaluation').data[0].marker.color[1] === colour(0)")


def test_pointing_at_a_step_shows_it_in_the_other_figures(opened: Any):
    opened.locator("#plot-reward").scroll_into_view_if_needed()
    opened.locator("#plot-reward .nsewdrag").first.hover()
    opened.wait_for_selector("#plot-accuracy .hoverlayer .legend", state="attached")


@pytest.mark.parametrize(
    ("name", "count"), [("all", 200), ("fixed", 116), ("broken", 0), ("disagree", 11), ("truncated", 8), ("wrong", 6)]
)
def test_filters_of_the_completions(opened: Any, name: str, count: int):
    opened.locator("#browse select").select_option(name)
    said = opened.locator("#browse output").inner_text()
    assert said == (f"1 to 5 of {count}" if count else "No problem fits.")
    opened.locator("#browse select").select_option("all")


def test_paging_and_search(opened: Any):
    opened.get_by_role("button", name="Next").click()
    assert opened.locator("#browse output").inner_text() == "6 to 10 of 200"
    assert opened.locator("#samples h3").first.inner_text() == "test-00005"
    opened.get_by_label("Question holds").fill("buys 17 boxes")
    assert opened.locator("#browse output").inner_text() == "1 to 1 of 1"
    opened.get_by_label("Question holds").fill("")


def test_a_line_that_never_changes_is_drawn_above_zero(opened: Any):
    ranges = {name: opened.evaluate(f"document.getElementById('plot-{name}').layout.yaxis.range") for name in
              ("ratio_mean", "clip_fraction")}  # fmt: skip
    assert ranges == {"ratio_mean": [0, 2], "clip_fraction": [0, 0.1]}


def test_the_keyboard_reaches_and_works_every_control(opened: Any):
    opened.reload()
    opened.wait_for_selector("#samples article")
    reached = []
    for _ in range(40):
        opened.keyboard.press("Tab")
        name = opened.evaluate("document.activeElement.name || document.activeElement.className || ''")
        if name == "run" and "run" not in reached:
            opened.keyboard.press("Space")
            assert [drawn["name"] for drawn in lines(opened, "reward")] == ["trl"]
            opened.keyboard.press("Space")
        if name == "axis":
            opened.keyboard.press("ArrowRight")
            assert lines(opened, "reward")[0]["x"][0] == 128
            opened.keyboard.press("ArrowLeft")
        if name == "smoothing":
            opened.keyboard.press("ArrowRight")
            assert opened.locator("#controls output").inner_text() == "10 steps"
            opened.keyboard.press("ArrowLeft")
        if name == "next":
            opened.keyboard.press("Enter")
            assert opened.locator("#browse output").inner_text() == "6 to 10 of 200"
            opened.get_by_role("button", name="Previous").press("Enter")
        reached.append(name)
    assert reached[0] == "skip"
    assert {"run", "axis", "smoothing", "filter", "search", "next", "scroll"} <= set(reached)


def test_on_paper_the_controls_are_gone_and_nothing_is_cut(opened: Any):
    opened.emulate_media(media="print", color_scheme="dark")
    assert not opened.locator("#controls").is_visible()
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    opened.set_viewport_size({"width": 688, "height": 900})  # A4 between its margins
    wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)"
    assert opened.evaluate(f"{wide}.map(box => box.ariaLabel)") == []
    assert len(opened.pdf(format="A4")) > 50_000
    opened.set_viewport_size({"width": 1200, "height": 900})
    opened.emulate_media(media="screen", color_scheme="light")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_axe_finds_nothing_serious(browser: Any, results: Path, language: str):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed").Axe()
    break_metrics(results / "trl" / "metrics.csv")  # so that verdicts of both kinds are on the page
    file = results / "report.html"
    file.write_text(page(results, language=language), encoding="utf-8")
    for scheme in ("light", "dark"):
        for width in (380, 1600):
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.goto(file.as_uri())
            tab.wait_for_selector("#samples article")
            found = axe.run(tab).response["violations"]
            tab.close()
            assert [(rule["id"], rule["impact"], [node["html"] for node in rule["nodes"]]) for rule in found] == []


@pytest.mark.parametrize("width", [380, 1600])
def test_nothing_sticks_out(opened: Any, width: int):
    opened.set_viewport_size({"width": width, "height": 900})
    deadline = time.monotonic() + 10  # figures follow a new width a moment later
    while opened.evaluate("document.documentElement.scrollWidth") > width and time.monotonic() < deadline:
        opened.wait_for_timeout(100)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


# The rule graph of the README


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_rule_graph_is_what_its_command_prints(readme: str):
    text = (ROOT / readme).read_text(encoding="utf-8")
    [(command, drawn)] = re.findall(r"<!-- Made by: PYTHONHASHSEED=0 (.*?) -->\n```mermaid\n(.*?)```", text, re.S)
    printed = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert arrows(drawn) == arrows(printed)
    assert ("train", "evaluate") in arrows(drawn)


def arrows(mermaid: str) -> set[tuple[str, str]]:
    """The graph by the names of its rules; their numbers change with the version of Python."""
    names = dict(re.findall(r"(\w+)\[(.*?)\]", mermaid))
    return {(names[first], names[second]) for first, second in re.findall(r"(\w+) --> (\w+)", mermaid)}


# Snakemake's own bundle


def test_snakemake_report_holds_the_pages_with_captions_and_categories(tmp_path: Path):
    copy = tmp_path / "copy"
    for folder in ("workflow", "rules", "scripts", "reports"):
        shutil.copytree(ROOT / folder, copy / folder)
    shutil.copy(ROOT / "config.yaml", copy)
    results = write_results(copy / "results")
    for run in ("scratch", "trl"):
        (results / run / "report.html").write_text(page(results), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "snakemake", "--config", "scale=demo", "--report", "bundle.zip", "--", "all"],
        cwd=copy, check=True, capture_output=True,
    )  # fmt: skip
    with zipfile.ZipFile(copy / "bundle.zip") as bundle:
        names = [Path(name).name for name in bundle.namelist()]
        [main] = [name for name in bundle.namelist() if name == "bundle/report.html"]
        text = bundle.read(main).decode()
    assert names.count("report.html") == 3  # two pages and the bundle's own
    assert names.count("metrics.csv") == names.count("manifest.json") == names.count("eval.json") - 1 == 2
    for said in ("once written by hand", "It is one file and", "Evaluation", "Training", "Page"):
        assert said in text, said
