"""The whole pipeline with the real Snakemake, on a clone in an awkward folder: killed, locked, finished, looked at."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).parents[1]
RUNS = ["scratch", "trl"]
STEPS = 8
SMALL = {
    "scale": "demo",
    "model": {"warm_start_steps": 40},
    "data": {"train_rows": 200, "validation_rows": 20, "test_rows": 20},
    "grpo": {
        "steps": STEPS, "prompts_per_step": 4, "group_size": 4, "max_tokens_per_micro_batch": 9999,
        "max_completion_tokens": 24,
        "evaluate_every": 4,
    },
    "evaluation": {"max_completion_tokens": 24},
    "checkpoint_every": 1,
}  # fmt: skip

pytestmark = pytest.mark.timeout(900)  # the first test waits for the whole pipeline


@contextmanager
def started(folder: Path, *arguments: str, config: dict | None = None, **env: str) -> Iterator[subprocess.Popen]:
    """`snakemake --cores 1 ...` with small settings, in a process group of its own, as a terminal starts it."""
    settings = folder.parent / f"{folder.name}.yaml"
    settings.write_text(yaml.safe_dump(SMALL if config is None else config), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1", *arguments, "--configfile", str(settings)],
        cwd=folder, env={**os.environ, **env}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:  # the test was stopped
            os.killpg(process.pid, signal.SIGKILL)


def snakemake(folder: Path, *arguments: str, **options) -> tuple[int, str]:
    """Exit code and output."""
    with started(folder, *arguments, **options) as process:
        output, _ = process.communicate()
    return process.returncode, output


def kill_in_training(folder: Path, run: str, with_signal: signal.Signals) -> tuple[int, str]:
    """Start the training of `run`, kill all of it after its first step; exit code and output."""
    metrics = folder / "results" / run / "metrics.csv"
    before = metrics.stat().st_mtime if metrics.exists() else 0
    # A training that goes on begins with the rows of its checkpoint.
    kept = max([1, *(p.read_text().count("\n") for p in folder.glob(f"checkpoints/{run}-*/*/metrics.csv"))])  # lines
    with started(folder, f"results/{run}/metrics.csv") as process:
        while not (metrics.exists() and metrics.stat().st_mtime > before and metrics.read_text().count("\n") > kept):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        os.killpg(process.pid, with_signal)
        output, _ = process.communicate()
    assert metrics_rows(folder, run) < STEPS, "the training was over before the signal came"
    return process.returncode, output


def metrics_rows(folder: Path, run: str) -> int:
    path = folder / "results" / run / "metrics.csv"
    return len(list(csv.DictReader(path.open(encoding="utf-8")))) if path.exists() else 0


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def clone(parent: Path) -> Path:
    """What a clone holds, uncommitted changes included, in a folder with Chinese and a space in its name."""
    folder = parent / "我的 clone"
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> dict:
    """One project from the clone to its pages, with three accidents on the way; what was said each time."""
    folder = clone(tmp_path_factory.mktemp("story"))
    said = {"folder": folder}
    said["terminated"] = kill_in_training(folder, "trl", signal.SIGTERM)
    said["after terminated"] = sorted(path.name for path in (folder / "results" / "trl").glob("*.*"))
    said["killed"] = kill_in_training(folder, "trl", signal.SIGKILL)
    said["after killed"] = metrics_rows(folder, "trl")
    said["locked"] = snakemake(folder, "all")
    said["unlock"] = snakemake(folder, "--unlock")
    said["interrupted"] = kill_in_training(folder, "scratch", signal.SIGINT)
    said["finished"] = snakemake(folder, "all")
    said["again"] = snakemake(folder, "all")
    return said


@pytest.fixture
def finished(story) -> Path:
    code, output = story["finished"]
    assert code == 0, output
    return story["folder"]


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy", symlinks=True)


def test_a_terminated_training_leaves_no_half_a_result(story):
    code, output = story["terminated"]
    assert code == 1
    assert "At least one job did not complete successfully" in output
    assert story["after terminated"] == []


def test_after_a_termination_the_same_command_goes_on(story):
    """It was killed again in its training, so it had got there: without a lock in its way, model and data kept."""
    _, output = story["killed"]
    assert "rule train" in output and "rule model" not in output and "rule data" not in output
    assert re.search(rf"going on from step \d of {STEPS}: checkpoints/trl-", output)


def test_a_stopped_training_says_so_in_one_line(story):
    """Ctrl-C reaches all processes at once; the training still ends its step, writes its checkpoint and its log."""
    code, output = story["interrupted"]
    assert code == 1
    log = (story["folder"] / "logs" / "train_scratch.log").read_text(encoding="utf-8")
    assert "Traceback" not in output and "Traceback" not in log
    said = "stopping after this step (again: at once)"
    assert said in output
    assert re.search(r"stopped after step \d; the same command goes on from its last checkpoint", output)


def test_after_kill_9_snakemake_asks_to_be_unlocked(story):
    """The README says so: `snakemake --unlock`, then the same command."""
    assert story["killed"][0] == -signal.SIGKILL
    assert 1 <= story["after killed"] < STEPS
    code, output = story["locked"]
    assert code == 1
    assert "Directory cannot be locked" in output and "--unlock" in output
    assert story["unlock"] == (0, story["unlock"][1])
    assert story["finished"][0] == 0, story["finished"][1]


def test_after_each_accident_the_curves_go_on_without_a_gap_or_a_doubled_step(story, finished):
    for run in RUNS:
        assert re.search(rf"going on from step \d of {STEPS}: checkpoints/{run}-", story["finished"][1])
        with (finished / "results" / run / "metrics.csv").open(encoding="utf-8") as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, STEPS + 1))
        assert list((finished / "checkpoints").glob(f"{run}-*/*")) == []  # they have served
        manifest = json.loads((finished / "results" / run / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["used"]["steps"] == STEPS
        assert manifest["trainer"] == run


def test_both_pages_show_both_runs(finished):
    for run in RUNS:
        page = (finished / "results" / run / "report.html").read_text(encoding="utf-8")
        assert page.lower().startswith("<!doctype html>")
        assert all(name in page for name in RUNS)
        assert str(finished) not in page  # nobody's folders


def test_a_run_of_two_processes_gives_the_curves_of_one_and_joins_the_page(copy):
    code, output = snakemake(copy, "results/scratch-2/report.html")
    assert code == 0, output
    assert "scripts.ranks" not in output and output.count("step    8  reward") == 1  # one of the two speaks
    assert "scratch-2" in (copy / "results" / "scratch-2" / "report.html").read_text(encoding="utf-8")
    one, two = (pd.read_csv(copy / "results" / run / "metrics.csv") for run in ("scratch", "scratch-2"))
    for name in ("reward", "completion_length_mean", "loss", "grad_norm", "entropy", "tokens", "validation_accuracy"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_training_asks_for_as_many_gpus_as_it_has_processes(copy):
    for profile in ([], ["--profile", "workflow/profiles/slurm"]):
        _, output = snakemake(copy, "-n", "results/scratch-2/metrics.csv", *profile)
        assert re.search(r"wildcards: run=scratch-2\n    resources: .*gpu=2\b", output), output


def test_a_second_run_has_nothing_to_do(story, finished):
    code, output = story["again"]
    assert code == 0
    assert "Nothing to be done" in output


def test_every_stage_leaves_its_log_and_its_benchmark(finished):
    stages = {"model", "data", "evaluate_baseline"}
    stages |= {f"{rule}_{run}" for rule in ("train", "evaluate", "page") for run in RUNS}
    assert {path.stem for path in (finished / "logs").glob("*.log")} == stages
    assert {path.stem for path in (finished / "logs" / "benchmarks").glob("*.tsv")} == stages
    assert f"step    {STEPS}  reward" in (finished / "logs" / "train_scratch.log").read_text(encoding="utf-8")
    for table in (finished / "logs" / "benchmarks").glob("*.tsv"):
        (row,) = csv.DictReader(table.open(encoding="utf-8"), delimiter="\t")
        assert float(row["s"]) > 0, table


def test_a_log_and_the_terminal_say_the_same(story, finished):
    """Stages run one after another, so all of it may be seen on the terminal, and is kept as well."""
    _, output = story["finished"]
    said = (finished / "logs" / "evaluate_baseline.log").read_text(encoding="utf-8").splitlines()[-1]
    assert said.startswith("baseline: flexible") and said in output


def test_what_is_made_stays_in_few_folders_of_the_project(finished):
    assert sorted(path.name for path in finished.parent.iterdir()) == ["我的 clone", "我的 clone.yaml"]
    made = {path.name for path in finished.iterdir()} - {name.split("/")[0] for name in tracked_files()}
    assert made <= {"models", "data", "results", "checkpoints", "logs", ".snakemake", ".cache"}


def test_a_changed_model_file_is_refused_by_name_before_anything_is_trained(copy):
    path = copy / "models" / "demo" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, output = snakemake(copy, "results/trl/metrics.csv", "--forcerun", "train")
    assert code == 1
    assert re.search(r"models/demo/model\.safetensors was changed: it has SHA-256 \w{12}\.\.\., not", output)
    assert "Traceback" not in output
    assert metrics_rows(copy, "trl") == 0


def test_an_unreachable_hub_is_named_with_ways_out(copy):
    shutil.rmtree(copy / "models")
    code, output = snakemake(
        copy, "models/Qwen3-0.6B/model.json", "--config", "scale=full",
        config={}, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(copy / "hub"), HF_HUB_OFFLINE="0",
    )  # fmt: skip
    assert code == 1
    assert re.search(r"Could not get the model Qwen/Qwen3-0\.6B .*http://127\.0\.0\.1:9 could not be reached", output)
    for way_out in ("this one comes from HF_ENDPOINT", "source: modelscope", "source: local", "scale: demo"):
        assert way_out in output
    assert "Traceback" not in output
    assert not list((copy / "models").rglob("model.json"))


def test_a_bad_setting_stops_everything_before_it_starts(copy):
    shutil.rmtree(copy / "results")
    code, output = snakemake(copy, "all", config={**SMALL, "grpo": {**SMALL["grpo"], "updates_per_batch": 2}})
    assert code == 1
    expected = (
        "config.yaml needs a change:\n"
        "grpo.old_logprobs: detach is exact for one update a batch, and updates_per_batch is 2; set recompute\n"
    )
    assert expected in output
    assert "Traceback" not in output and "Building DAG" not in output
    assert not (copy / "results").exists()


def test_an_unknown_run_is_named(copy):
    code, output = snakemake(copy, "results/trll/report.html")
    assert code == 1
    assert "config.yaml has no run 'trll'; it has scratch, trl, scratch-stale, " in output
