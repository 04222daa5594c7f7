"""The page: what it says about made-up runs, and what its controls do in a real browser."""

import csv
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.report.compare import cost, paired, settings_rows, three_places
from scripts.report.page import COMPLETIONS_BYTES, EXPECTED, build
from scripts.report.read import read_run
from scripts.report.words import ENGLISH, p_value

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "21 - 2 = 19 </script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'> {{ 7 * 7 }} &lt;b&gt;"
SETTINGS = {"smoothing": 9, "language": "en", "scale": "demo"}

# What TRL has no number for stays empty.
UNKNOWN_TO_TRL = {"ratio_mean", "seconds_reward", "logprob_difference"}


def write_metrics(folder: Path, seed: int, steps: int, unknown: set[str] = frozenset()) -> None:
    """A run that learns, with the raggedness of real ones: empty cells, a nan, validation every tenth step."""
    noise = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*EXPECTED, "validation_accuracy"], restval="")
        writer.writeheader()
        clock = 0.0
        for step in range(1, steps + 1):
            learned = 0.58 + 0.36 * (1 - math.exp(-4 * step / steps))
            accuracy = min(1.0, max(0.0, noise.gauss(learned, 0.05)))
            phases = {"rollout": noise.gauss(0.31, 0.02), "reward": 0.004, "train": noise.gauss(0.17, 0.01), "push": 0.013}
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
                "kl": "nan" if step == 7 else 0.02 * step / steps,
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
    derived = {"sequences_per_step": 128, "importance_correction": "none", "advantage_epsilon": 1e-4, "dtype": "float32"}
    sampler = {"sampler": "vllm" if trainer == "scratch" else "transformers"}
    names = {"group_size": "num_generations", "max_completion_tokens": "max_completion_length", "learning_rate": "learning_rate"}
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
    (folder / "samples.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
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


def grades(*parts: tuple[int, bool]) -> list[bool]:
    return [right for count, right in parts for _ in range(count)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Baseline 78 of 200, scratch 190, trl 187: 7 only scratch, 4 only trl."""
    folder = tmp_path / "results"
    write_answers(folder / "baseline", grades((78, True), (122, False)))
    write_run(folder / "scratch", "scratch", grades((190, True), (10, False)), seed=1)
    write_run(folder / "trl", "trl", grades((183, True), (7, False), (4, True), (6, False)), seed=2)
    return folder


def page(results: Path, *names: str, **settings: Any) -> str:
    return build(names or ("scratch", "trl"), results, {**SETTINGS, **settings}, "results/trl/report.html")
