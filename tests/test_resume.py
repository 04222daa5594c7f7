"""A run that was stopped goes on where it was: the same curves, the same prompts, the same weights."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from conftest import ROOT
from test_trainers import MODULES, TIMES, manifest, metrics, trainer_module
from transformers import AutoModelForCausalLM

from scripts import checkpoints as module
from scripts import settings as project_settings
from scripts.cli import RunStopped
from scripts.run_record import RunRecord

TRAINERS = ["scratch", "trl"]


@pytest.fixture
def start(settings, demo_model, demo_data, tmp_path, monkeypatch):
    """start(trainer, out, ...) trains in a folder of its own, with transformers as the sampler."""
    monkeypatch.chdir(tmp_path)
    # All runs of a test are in one process, which no lock keeps apart; it is tested by itself.
    monkeypatch.setattr(module, "_locked", lambda path: SimpleNamespace(release=lambda: None))

    def train(trainer: str, out: str, every: int = 2, stop_after: int | None = None, **grpo) -> pd.DataFrame:
        run = project_settings.run_settings(settings, trainer)
        run["grpo"] = {**run["grpo"], "steps": 6, "lr_schedule": "linear", "warmup_steps": 2, **grpo}
        run["engine"]["name"] = "transformers"
        with monkeypatch.context() as patch:
            if stop_after:
                patch.setattr(RunRecord, "write", stopping(RunRecord.write, stop_after))
            trainer_module(trainer).train(run, demo_model, demo_data, Path(out), "none", every)
        return metrics(Path(out))

    return train


def stopping(write, step):
    """As a person who presses Ctrl-C while the line of this step is written."""

    def written(record, row):
        write(record, row)
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    return written


class Killed(BaseException):
    """No handler catches it, so the process ends as if by SIGKILL: at once, with nothing saved."""


def dying(write, step):
    def written(record, row):
        write(record, row)
        if row["step"] == step:
            raise Killed

    return written


def assert_equal_runs(one: Path, other: Path) -> None:
    dropped = [name for name in TIMES if name != "seconds"] + ["seconds"]
    pd.testing.assert_frame_equal(metrics(one).drop(columns=dropped), metrics(other).drop(columns=dropped))
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder / "model") for folder in (one, other))
    for name, weight in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), weight), name


CHANGES = {
    "plain": {},
    "two updates a batch": {"updates_per_batch": 2, "old_logprobs": "recompute"},
    "LoRA and KL": {"lora_rank": 4, "beta": 0.04},
}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_interrupted_run_goes_on_to_the_same_end(trainer, start, tmp_path, changes):
    """Bit for bit the uninterrupted run: weights, metrics, prompts, validation."""
    start(trainer, "whole", **CHANGES[changes])
    last = 3 if trainer == "scratch" else 4  # TRL writes its row when the next step has as good as begun
    with pytest.raises(RunStopped, match=f"stopped after step {last}; the same command goes on from its last"):
        start(trainer, "parts", every=0, stop_after=3, **CHANGES[changes])
    assert len(metrics(Path("parts"))) == last
    shutil.rmtree("parts")  # as Snakemake does with the outputs of a stage that failed
    rows = start(trainer, "parts", **CHANGES[changes])
    assert rows["step"].tolist() == [1, 2, 3, 4, 5, 6] and rows["seconds"].is_monotonic_increasing
    assert_equal_runs(Path("whole"), Path("parts"))
    assert manifest(Path("parts"))["used"] == manifest(Path("whole"))["used"]
    assert not list(Path("checkpoints").glob("*/*"))  # they have served


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_killed_run_loses_the_steps_since_its_last_checkpoint_and_no_more(trainer, start, monkeypatch, capsys):
    start(trainer, "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunRecord, "write", dying(RunRecord.write, 5))
        start(trainer, "parts")
    start(trainer, "parts")
    assert "going on from step 4 of 6: checkpoints/" in capsys.readouterr().out
    assert_equal_runs(Path("whole"), Path("parts"))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("damage", ["torn", "unfinished", "changed"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(trainer, start, monkeypatch, capsys, damage):
    start(trainer, "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunRecord, "write", dying(RunRecord.write, 5))
        start(trainer, "parts")
    newest = next(Path("checkpoints").glob("*/checkpoint-4"))
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    if damage == "torn":
        largest.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        largest.write_bytes(content[:5000] + b"\x00\x01" + content[5002:])
    else:
        (newest / module.SEAL).unlink()
    start(trainer, "parts")
    said = capsys.readouterr().out
    reason = "it was not finished" if damage == "unfinished" else f"{largest.name} is damaged"
    assert f"{newest} is not whole ({reason}); left out" in said and "going on from step 2 of 6" in said
    assert_equal_runs(Path("whole"), Path("parts"))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_changed_settings_never_resume_old_weights(trainer, start, capsys):
    with pytest.raises(RunStopped):
        start(trainer, "parts", stop_after=3)
    start(trainer, "parts", learning_rate=2e-4)
    assert "going on" not in capsys.readouterr().out
    assert len({path.parent for path in Path("checkpoints").glob("*/checkpoint-*")}) == 1  # the other run's


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_that_ran_out_of_memory_goes_on_with_less(trainer, start, capsys, settings):
    """Smaller micro-batches and checkpointed activations change rounding only (but for TRL's bnpo)."""
    start(trainer, "whole")
    with pytest.raises(RunStopped):
        start(trainer, "parts", stop_after=3)
    settings["engine"] |= {"memory_gib": 2.0, "sleep": "always"}
    rows = start(trainer, "parts", max_tokens_per_micro_batch=200, gradient_checkpointing=True)
    assert "going on from step" in capsys.readouterr().out
    for name in ("reward", "loss", "grad_norm", "entropy", "completion_length_mean"):
        torch.testing.assert_close(*(torch.tensor(m[name].to_numpy()) for m in (rows, metrics(Path("whole")))),
                                   atol=1e-5, rtol=1e-3)  # fmt: skip


def test_with_bnpo_the_micro_batch_is_mathematics(settings):
    run = project_settings.run_settings(settings, "trl")
    less = {
        **run,
        "grpo": {**run["grpo"], "max_tokens_per_micro_batch": 7},
        "engine": {**run["engine"], "sleep": "never"},
    }
    assert module.without_memory_settings(less) == module.without_memory_settings(run)
    for one in (run, less):
        one["grpo"]["loss_type"] = "bnpo"
    assert module.without_memory_settings(less) != module.without_memory_settings(run)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(trainer, start, monkeypatch, capsys):
    def full(folder, metrics):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "seal", full)
    monkeypatch.setattr(trainer_module("trl"), "seal", full)
    rows = start(trainer, "out")
    assert len(rows) == 6
    assert "no checkpoint this time: [Errno 28] No space left on device" in capsys.readouterr().out


def test_two_are_kept(start, monkeypatch):
    for trainer in TRAINERS:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RunRecord, "write", dying(RunRecord.write, 6))
            start(trainer, trainer, every=1)
    kept = sorted(path.name for path in Path("checkpoints").glob("*/checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-4", "checkpoint-5", "checkpoint-5"]


def test_a_second_process_waits_for_the_first(tmp_path):
    """However the first one ends: here by SIGKILL."""
    code = "from pathlib import Path; from scripts.checkpoints import _locked; import sys\n"
    code += "lock = _locked(Path('checkpoints/scratch.lock')); print('mine', flush=True); sys.stdin.read()"
    with python(code, tmp_path) as first:
        assert first.stdout.readline() == "mine\n"
        with python(code, tmp_path) as second:
            assert second.stdout.readline() == (
                "another process trains this run (checkpoints/scratch.lock is locked); waiting for it to end\n"
            )
            first.kill()
            assert second.stdout.readline() == "mine\n"
            second.kill()


def python(code: str, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_checkpoint_records_each_of_its_files(start, monkeypatch):
    with pytest.raises(RunStopped):
        start("scratch", "out", every=0, stop_after=1)
    folder = next(Path("checkpoints").glob("*/checkpoint-1"))
    record = json.loads((folder / module.SEAL).read_text())
    assert set(record) == {"state.pt", "metrics.csv"}
    assert record["state.pt"]["bytes"] == (folder / "state.pt").stat().st_size


KILLS = int(os.environ.get("KILLS", "2"))


@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(
    trainer, settings, demo_model, demo_data, tmp_path, monkeypatch
):
    """At random moments, while starting and while training, by SIGINT, SIGTERM and SIGKILL. KILLS=30 for thirty."""
    monkeypatch.chdir(tmp_path)
    run = project_settings.run_settings(settings, trainer)
    run["grpo"] = {**run["grpo"], "steps": 10 * KILLS, "evaluate_every": 0}
    run["engine"]["name"] = "transformers"
    arguments = ["--run", trainer, "--settings", json.dumps(run), "--model", demo_model, "--data", demo_data]
    command = [sys.executable, "-m", MODULES[trainer], *map(str, arguments), "--checkpoint-every", "1", "--out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    rng, kills, lost = random.Random(trainer), 0, 0
    with Path("log.txt").open("w") as log:
        while kills < KILLS:
            rows = Path("parts/metrics.csv")
            before = done(rows)
            process = subprocess.Popen([*command, "parts"], env=environment, stdout=log, stderr=log)
            if rng.random() < 0.7:  # in training: some time after a new row; else while it starts
                while done(rows) in (0, before) and process.poll() is None:
                    time.sleep(0.02)
            time.sleep(rng.random())
            assert process.poll() in (None, 0), Path("log.txt").read_text()[-3000:]
            number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
            reached = done(rows)
            process.send_signal(number)
            process.wait()
            kills += 1
            resumed = max((module.step_of(p) for p in Path("checkpoints").glob("*/checkpoint-*")), default=0)
            lost += max(0, reached - resumed)
            shutil.rmtree("parts", ignore_errors=True)  # as Snakemake does
        subprocess.run([*command, "parts"], env=environment, stdout=log, stderr=log, check=True)
        subprocess.run([*command, "whole"], env=environment, stdout=log, stderr=log, check=True)
    print(f"{trainer}: {kills} kills, {lost} finished steps lost")
    assert metrics(Path("parts"))["step"].tolist() == list(range(1, 10 * KILLS + 1))
    assert_equal_runs(Path("whole"), Path("parts"))


def done(rows: Path) -> int:
    """Steps that stand in metrics.csv."""
    try:
        return max(0, rows.read_text().count("\n") - 1)
    except FileNotFoundError:  # not there yet, or removed by Snakemake
        return 0
