"""A training that two processes share: it must be the training of one process, only divided."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from conftest import ROOT, run_module
from test_resume import done
from test_trainers import MODULES, TIMES, manifest, metrics
from transformers import AutoModelForCausalLM

from scripts import ranks
from scripts import settings as project_settings
from scripts.settings import SettingsError, load

TWO = ["scripts.ranks", "2"]  # as rules/train.smk starts them
STEPS = 10

# TRL draws from torch's own random numbers, which two processes cannot share out alike; here it samples as our engine.
SEEDED_TRL = """
import scripts.trl_grpo.train as module
from scripts.grpo_scratch.rollout import Sampling, transformers_generate

def seeded(self, prompts, *_):
    sampling = Sampling(self.num_generations, self.max_completion_length, seed=self.state.global_step)
    model = self.accelerator.unwrap_model(self.model).eval()
    groups = transformers_generate(model, self.eos_token_ids, prompts[:: self.num_generations], sampling, 64)
    model.train()
    return [completion.token_ids for group in groups for completion in group], None

module.ObservedGRPOTrainer._generate_single_turn = seeded
with module.errors_for_people():
    a = module.run_arguments("")
    module.train(a.settings, a.model, a.data, a.out, a.tracking, a.checkpoint_every)
"""


@pytest.fixture
def command(demo_settings, demo_model, demo_data, tmp_path):
    """command(trainer, processes, **grpo): arguments for run_module and where the run writes to."""
    (tmp_path / "seeded_trl.py").write_text(SEEDED_TRL)

    def arguments(trainer: str, processes: int, engine: str = "transformers", **grpo) -> tuple[list[str], Path]:
        run = project_settings.run_settings(demo_settings, trainer)
        run["grpo"] = {**run["grpo"], "processes": processes, "steps": STEPS, "evaluate_every": 5, **grpo}
        run["engine"] = {**run["engine"], "name": engine}
        module = MODULES["scratch"] if trainer == "scratch" else "seeded_trl"
        out = tmp_path / f"{trainer}-{processes}"
        arguments = ["--run", trainer, "--settings", json.dumps(run), "--model", demo_model, "--data", demo_data]
        started = [*TWO, module] if processes > 1 else [module]
        return [*started, *map(str, arguments), "--out", str(out)], out

    return arguments


@pytest.fixture
def trained(command, tmp_path):
    """trained(trainer, processes, engine) trains to the end; the run's folder, and what was said."""

    def train(*run) -> tuple[Path, str]:
        arguments, out = command(*run)
        return out, run_module(*arguments, cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})

    return train


def largest_difference(one: Path, other: Path) -> float:
    """Of the trained weights, against the largest weight."""
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder / "model") for folder in (one, other))
    return max(
        ((ours.get_parameter(name) - weight).abs().max() / weight.abs().max()).item()
        for name, weight in theirs.named_parameters()
    )


@pytest.mark.parametrize(("trainer", "engine"), [("scratch", "transformers"), ("scratch", "vllm"), ("trl", "its own")])
def test_two_processes_learn_what_one_learns(command, trained, tmp_path, trainer, engine):
    """Stopped on the way, even: the same prompts, completions, rewards, loss, gradient, and weights in the end."""
    if engine == "vllm" and not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed here")
    arguments, two = command(trainer, 2, engine)
    stopped = stop_after(2, [*arguments, "--checkpoint-every", "2"], tmp_path)
    (two / "metrics.csv").unlink()  # as Snakemake does
    (one, _), (two, said) = trained(trainer, 1, engine), trained(trainer, 2, engine)
    assert f"going on from step {stopped} of {STEPS}" in said
    ours, theirs = metrics(one), metrics(two)
    assert ours["step"].tolist() == theirs["step"].tolist() == list(range(1, STEPS + 1))
    assert ours["prompts"].tolist() == theirs["prompts"].tolist()
    assert (ours["grad_norm"] > 0.01).all() and ours["validation_accuracy"].notna().any()
    for name in ours.columns.drop([*TIMES, "prompts"]):
        np.testing.assert_allclose(theirs[name], ours[name], rtol=1e-4, atol=1e-5, err_msg=name)
    difference = largest_difference(one, two)
    print(f"{trainer}, {engine}: weights differ by at most {difference:.1e} of the largest")
    assert difference < 1e-4
    used = manifest(two)["used"]
    assert used["processes"] == 2 and {**used, "processes": 1} == manifest(one)["used"]


def stop_after(step: int, arguments: list[str], folder: Path) -> int:
    """Start a training, and press Ctrl-C as soon as this step's row is written; the step that it stopped after."""
    with training(step, arguments, folder) as process:
        process.send_signal(signal.SIGINT)
        process.wait()
    said = (folder / "said.txt").read_text()
    assert process.returncode == 130 and "Traceback" not in said, said
    (stopped,) = re.findall(r"stopped after step (\d+)", said)
    return int(stopped)


@contextmanager
def training(step: int, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """A training that has written this step's row; what it says goes to said.txt."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    rows = Path(arguments[arguments.index("--out") + 1]) / "metrics.csv"
    with (folder / "said.txt").open("w") as file:
        command = [sys.executable, "-m", *arguments]
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file) as process:
            while process.poll() is None and done(rows) < step:
                time.sleep(0.02)
            yield process


def test_a_process_that_is_killed_takes_the_others_with_it_and_says_so(command, tmp_path):
    arguments, _ = command("scratch", 2)
    with training(2, [*arguments, "--checkpoint-every", "1"], tmp_path) as process:
        (second,) = (p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1")
        second.kill()
        process.wait()
    said = (tmp_path / "said.txt").read_text()
    assert process.returncode == 128 + signal.SIGKILL
    assert said.endswith("process 1 of 2 was ended by signal 9; the others with it\n") and "Traceback" not in said, said
    assert list(tmp_path.glob("checkpoints/*/checkpoint-*"))


def test_more_processes_than_the_settings_say_stop_before_any_work(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks.start(1)  # a cluster's own variable, without torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SettingsError, match=r"grpo\.processes is 1, but 2 started"):
        ranks.start(1)


def test_more_processes_than_gpus_stop_before_any_work(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SettingsError, match=r"grpo\.processes is 4, but only 2 GPUs are visible"):
        ranks.start(4)


def test_a_group_of_one_is_ended_at_exit_after_vllms_own_end():
    """What vLLM registers later goes first and still finds the group; what was registered before both finds none."""
    program = """
import atexit
atexit.register(lambda: print("in the end:", dist.is_initialized()))
import torch.distributed as dist
import weakref
from scripts import ranks
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weakref.finalize(ranks, lambda: print("vLLM's end:", dist.is_initialized()))
"""
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.splitlines() == ["vLLM's end: True", "in the end: False"] and "Traceback" not in said.stderr


def test_prompts_that_cannot_be_shared_evenly_are_refused():
    config = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    config["runs"]["scratch-3"] = {"trainer": "scratch", "processes": 3}
    with pytest.raises(SettingsError, match=r"runs\.scratch-3\.processes: 3 processes cannot share 8 prompts evenly"):
        load(config, "full")
