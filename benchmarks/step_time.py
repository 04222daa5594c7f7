"""What a training step costs by hand and with TRL: the runs in turns, each in its own process, medians of metrics.csv.

python -m benchmarks.step_time --model models/demo --data data/demo --out benchmarks/results/demo

Model and questions must be prepared (snakemake models/demo/model.json data/demo/data.json). Prints a Markdown table;
leaves it in --out with the numbers behind it, and metrics, manifest and log of every training.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from tqdm import tqdm

from benchmarks.gpu import gpu_memory, least_seconds, measured_bandwidth
from scripts.cli import errors_for_people
from scripts.settings import SettingsError, as_text, load, read, run_settings

ROOT = Path(__file__).parents[1]
MODULES = {"scratch": "scripts.grpo_scratch.train", "trl": "scripts.trl_grpo.train"}
WARM_UP = 3  # steps that compile, allocate and fill caches; they count for nothing
PHASES = ["rollout", "reward", "train", "push"]


def overridden(config: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`config` with each `section.key=value` written into it; `load` says which of them are wrong."""
    for text in overrides:
        path, equals, value = text.partition("=")
        *sections, key = path.split(".")
        if not equals:
            raise SettingsError(f"--set {text}: write section.key=value")
        if path in ("grpo.steps", "grpo.evaluate_every"):
            raise SettingsError(f"--set {text}: the benchmark sets it; give --steps for the length")
        place = config
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        try:
            place[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise SettingsError(f"--set {text}: {value!r} is no YAML value") from None
    return config


def chosen_runs(names: list[str], config: Path, overrides: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """The settings of each run, with `steps` steps and no looks at the validation split."""
    settings = load(overridden(read(config), overrides))
    runs = {}
    for name in names:
        if name not in settings["runs"]:
            raise SettingsError(f"--runs: {config} has no run {name!r} (it has {', '.join(settings['runs'])})")
        runs[name] = run_settings(settings, name)
        runs[name]["grpo"] = {**runs[name]["grpo"], "steps": steps, "evaluate_every": 0}
        if runs[name]["grpo"]["processes"] > 1:
            raise SettingsError(f"--runs: {name} trains in several processes; the benchmark measures one, on one GPU")
    return runs


def train(settings: dict[str, Any], model: Path, data: Path, kept: Path, chance: bool = False) -> float:
    """One training in a process and a fresh folder of its own; keeps `kept`.csv, .json and .log.

    In its folder it finds no checkpoint, from which it would go on. Rewards may be drawn by `chance`.

    Returns:
        The most memory in use on the GPU meanwhile (GiB), without what was in use before; 0 without a GPU.
    """
    # What the pipeline sets for its trainings, see rules/common.smk.
    defaults = {"GOMP_SPINCOUNT": "10000", "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**defaults, "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"), **os.environ, "PYTHONPATH": path}
    log, metrics, manifest = (kept.with_name(f"{kept.name}.{ending}") for ending in ("log", "csv", "json"))
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        command = [sys.executable, "-m", *["benchmarks.chance"] * chance, MODULES[settings["trainer"]]]
        command += ["--run", settings["run"], "--out", "out"]
        command += ["--model", str(model.resolve()), "--data", str(data.resolve()), "--settings", as_text(settings)]
        with log.open("w", encoding="utf-8") as file, gpu_memory() as most:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            sys.exit("\n".join([f"{settings['run']} ended with exit code {done.returncode}; see {log}:", *last]))
        shutil.copyfile(Path(folder) / "out" / "metrics.csv", metrics)
        shutil.copyfile(Path(folder) / "out" / "manifest.json", manifest)
    return max(most)


def summary(repeats: list[pd.DataFrame], peaks: list[float], least: pd.Series | None) -> dict[str, Any]:
    """One run's numbers: medians over the steps of all its repeats, in seconds, tokens and GiB.

    Args:
        least: seconds of each step's rollout if only memory traffic counted; None where that is not known.
    """
    rows = pd.concat(repeats, ignore_index=True)
    found = {
        "step": rows["seconds_step"].median(),
        "repeats": [repeat["seconds_step"].median() for repeat in repeats],
        **{phase: rows[f"seconds_{phase}"].median() for phase in PHASES},
        "tokens_a_second": (rows["tokens"] / rows["seconds_step"]).median(),
        "tokens": rows["tokens"].median(),
        "peak_gib": max(peaks) or rows["memory_gib"].max(),
        "roofline": None if least is None else (least / rows["seconds_rollout"]).median(),
        "steps": len(rows),
        "steps_without_advantage": int((rows["degenerate_groups"] == 1).sum()),
    }
    return {name: None if isinstance(value, float) and pd.isna(value) else value for name, value in found.items()}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row a run, then the first run's step over the second's."""
    roofline = any(run["roofline"] is not None for run in found.values())
    head = ["run", "s a step", "spread", *PHASES, "tokens/s", "tokens a step", "peak GiB"] + ["of roofline"] * roofline
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, run in found.items():
        seconds = ["–" if run[phase] is None else f"{run[phase]:.3f}" for phase in PHASES]
        spread = f"{min(run['repeats']):.3f} to {max(run['repeats']):.3f}"
        counts = [f"{run['tokens_a_second']:.0f}", f"{run['tokens']:.0f}", f"{run['peak_gib']:.1f}"]
        share = [f"{run['roofline']:.0%}"] if roofline else []
        lines.append([name, f"{run['step']:.3f}", spread, *seconds, *counts, *share])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if len(found) > 1:
        (first, a), (second, b), *_ = found.items()
        pairs = [x / y for x, y in zip(a["repeats"], b["repeats"], strict=True)]
        text += f"\n{first} / {second}: {a['step'] / b['step']:.3f} ({min(pairs):.3f} to {max(pairs):.3f})\n"
    idle = [f"{name} {run['steps_without_advantage']} of {run['steps']}" for name, run in found.items()]
    if any(run["steps_without_advantage"] for run in found.values()):
        text += (
            f"\nSteps in which all completions of each group earned the same: {', '.join(idle)}. By hand these have "
        )
        text += "no backward pass, unless grpo.beta is above 0.\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="prepared model, models/<id>")
    parser.add_argument("--data", type=Path, required=True, help="prepared questions, data/<id>")
    parser.add_argument("--runs", nargs="+", default=["scratch", "trl"], help="of runs: in the config; in this order")
    parser.add_argument("--steps", type=int, default=20, help=f"measured steps of a training, after {WARM_UP} more")
    parser.add_argument("--repeats", type=int, default=3, help="trainings of each run")
    parser.add_argument("--config", type=Path, default=ROOT / "config.yaml")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="such as grpo.beta=0.1"
    )
    parser.add_argument("--chance", action="store_true", help="rewards by chance, for a model that earns nothing")
    parser.add_argument("--out", type=Path, required=True, help="benchmarks/results/<name>")
    args = parser.parse_args()
    if min(args.steps, args.repeats) < 1:
        parser.error("--steps and --repeats are at least 1")
    runs = chosen_runs(args.runs, args.config, args.set, args.steps + WARM_UP)
    args.out.mkdir(parents=True, exist_ok=True)

    rows: dict[str, list[pd.DataFrame]] = {name: [] for name in runs}
    peaks: dict[str, list[float]] = {name: [] for name in runs}
    # In turns: a machine that gets slower or warmer meanwhile does so for all runs alike.
    turns = [(repeat, name) for repeat in range(1, args.repeats + 1) for name in runs]
    print(f"{len(turns)} trainings ({', '.join(runs)} in turns) of {WARM_UP} + {args.steps} steps", flush=True)
    for repeat, name in tqdm(turns, unit="training"):
        peaks[name].append(train(runs[name], args.model, args.data, args.out / f"{name}-{repeat}", args.chance))
        rows[name].append(pd.read_csv(args.out / f"{name}-{repeat}.csv").iloc[WARM_UP:])

    bandwidth = measured_bandwidth()
    found = {}
    for name, settings in runs.items():
        least = least_seconds(args.model, settings["grpo"], pd.concat(rows[name], ignore_index=True), bandwidth)
        found[name] = summary(rows[name], peaks[name], least)

    manifest = json.loads((args.out / f"{next(iter(runs))}-1.json").read_text(encoding="utf-8"))
    numbers = {
        "command": shlex.join(["python", "-m", "benchmarks.step_time", *sys.argv[1:]]),
        "overrides": args.set,
        "gpu": next((gpu["name"] for gpu in manifest["hardware"]["gpus"]), None),
        **{name: manifest[name] for name in ("commit", "hardware", "versions", "model", "data")},
        "copied_bytes_a_second": bandwidth,
        "runs": found,
    }
    (args.out / "numbers.json").write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (args.out / "table.md").write_text(table(found), encoding="utf-8")
    print(table(found), end="")


if __name__ == "__main__":
    with errors_for_people():
        main()
