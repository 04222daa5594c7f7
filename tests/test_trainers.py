"""Both trainers and what follows them, really run on the tiny model: metrics, manifest, evaluation, smoke checks."""

import importlib
import importlib.util
import itertools
import json
import math
import random
import re
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import run_module
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from scripts import settings as project_settings
from scripts.cli import RunStopped
from scripts.evaluate import evaluate, graded_group, pass_at_k, powers, shown, with_interval
from scripts.grpo_scratch import train as scratch
from scripts.grpo_scratch.rewards import correctness_reward, strict_match
from scripts.grpo_scratch.rollout import Completion, Sample, Sampling
from scripts.prepared import ModelFilesError, read_rows, sha256_of, verify
from scripts.prompts import prompt_text
from scripts.report.compare import same
from scripts.run_record import COLUMNS, Clock, Following, prompts_digest, step_questions
from scripts.settings import SettingsError
from scripts.smoke import faults

MODULES = {"scratch": "scripts.grpo_scratch.train", "trl": "scripts.trl_grpo.train"}
TOKEN = "hf_thisisnosecretthisisnosecret"
STEPS = 3
SEQUENCES = 16


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Each test in a folder of its own; runs that fail here leave their lock to this process, which goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scripts.checkpoints._locked", lambda path: SimpleNamespace(release=lambda: None))


@pytest.fixture(scope="module")
def trained(demo_settings, demo_model, demo_data, tmp_path_factory) -> Path:
    """A folder with results/scratch and results/trl, trained as the pipeline trains them, each in its process."""
    folder = tmp_path_factory.mktemp("trained")
    for run, module in MODULES.items():
        settings = project_settings.run_settings(demo_settings, run)
        settings["grpo"] = {**settings["grpo"], "lr_schedule": "linear", "warmup_steps": 1}
        arguments = ["--model", demo_model, "--data", demo_data, "--tracking", "tensorboard"]
        run_module(
            module, "--run", run, "--settings", json.dumps(settings), "--out", f"results/{run}", *arguments,
            cwd=folder, env={"HF_TOKEN": TOKEN},
        )  # fmt: skip
    return folder


def metrics(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "metrics.csv")


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


@pytest.fixture(params=MODULES)
def result(request, trained) -> Path:
    return trained / "results" / request.param


def test_metrics_have_the_same_columns_and_a_row_a_step(result):
    rows = metrics(result)
    assert list(rows.columns) == COLUMNS
    assert rows["step"].tolist() == list(range(1, STEPS + 1))
    assert rows["seconds"].is_monotonic_increasing


def test_metrics_are_finite_and_in_their_range(result):
    rows = metrics(result)
    unknown = {
        "kl",
        "correction_mean",
        "corrected_share",
        "validation_accuracy",
    }  # beta 0, no correction; not each step
    if (
        result.name == "trl"
    ):  # it logs no mean ratio and skips no step; without vLLM no push, and nothing of the sampler
        unknown |= {"ratio_mean", "skipped", "seconds_push", "logprob_difference", "kl_sampler", "sampler_ratio_max"}
    known = rows.drop(columns=[*unknown, "prompts"])
    assert np.isfinite(known.to_numpy(dtype=float)).all(), known
    shares = ["accuracy", "degenerate_groups", "clip_fraction", "truncated_share", "reward_correct"]
    assert rows[shares].to_numpy().min() >= 0 and rows[shares].to_numpy().max() <= 1
    assert (rows["entropy"] > 0).all() and (rows["grad_norm"] > 0).all() and (rows["memory_gib"] > 0.1).all()
    assert (rows["completion_length_max"] <= 24).all()
    assert (rows["clip_fraction"] == 0).all()  # one update a batch: exactly on policy


def test_reward_is_the_sum_of_its_parts(result):
    rows = metrics(result)
    np.testing.assert_allclose(rows["reward"], rows["reward_correct"] + rows["reward_format"], atol=1e-5)
    np.testing.assert_allclose(rows["reward_correct"], rows["accuracy"], atol=1e-5)  # its weight is 1
    assert (rows["reward_format"] <= 0.1 + 1e-6).all() and (rows["reward_format"] > 0).any()


def test_tokens_are_mean_length_times_sequences(result):
    rows = metrics(result)
    np.testing.assert_allclose(rows["tokens"], rows["completion_length_mean"] * SEQUENCES, rtol=1e-5)


def test_phases_add_up_to_the_step(result):
    rows = metrics(result)
    phases = rows[["seconds_rollout", "seconds_reward", "seconds_train", "seconds_push"]].fillna(0)
    assert (phases.to_numpy() >= 0).all()
    assert (phases.sum(axis=1) <= rows["seconds_step"] + 1e-3).all()
    assert (phases.sum(axis=1) >= 0.9 * rows["seconds_step"]).all()
    assert (rows["seconds_step"].cumsum() <= rows["seconds"] + 1).all()


def test_validation_is_looked_at_every_second_step(result):
    accuracy = metrics(result)["validation_accuracy"]
    assert accuracy.isna().tolist() == [True, False, True]
    assert round(10 * accuracy[1], 6) in range(11)  # of ten questions


def test_both_trainers_draw_the_same_questions(trained, demo_settings, demo_data):
    drawn = [metrics(trained / "results" / run)["prompts"].tolist() for run in MODULES]
    assert drawn[0] == drawn[1]
    ids = [row["id"] for row in read_rows(demo_data / "train.jsonl")]
    draws = step_questions(len(ids), 4, STEPS, demo_settings["grpo"]["seed"])
    assert drawn[0] == [prompts_digest([ids[i] for i in draw]) for draw in draws]
    assert len(set(drawn[0])) == STEPS


def test_learning_rates_are_equal_step_by_step(trained, demo_settings):
    """Linear with one step of warmup: 0, then the peak, then half of it."""
    peak = demo_settings["grpo"]["learning_rate"]
    for run in MODULES:
        assert metrics(trained / "results" / run)["learning_rate"].tolist() == pytest.approx([0, peak, peak / 2])


# What a run leaves behind


def test_the_manifest_holds_what_was_asked_and_what_was_used(result):
    """Every setting under `used`, read off the finished objects, is the one that was asked for."""
    said = manifest(result)
    asked, used = said["settings"]["grpo"], said["used"]
    assert asked["lr_schedule"] == "linear" and asked["warmup_steps"] == 1
    compared = asked.keys() & used.keys()
    assert [name for name in compared if not same(asked[name], used[name])] == []
    assert asked.keys() - compared <= {"evaluate_every"}  # not GRPO's, and TRL has no part in it
    assert used["sequences_per_step"] == SEQUENCES
    assert used["advantage_epsilon"] == 1e-4
    assert used["weights_dtype"] == "fp32"
    assert "weight decay 0.0" in used["optimizer"]
    vllm = result.name == "scratch" and importlib.util.find_spec("vllm")  # TRL has no vLLM on a CPU
    assert used["sampler"] == ("vllm" if vllm else "transformers")


def test_both_manifests_compare(trained):
    used = [manifest(trained / "results" / run)["used"] for run in MODULES]
    differing = {name for name in used[0].keys() & used[1].keys() if not same(used[0][name], used[1][name])}
    assert differing <= {"sampler"}
    one, other = (manifest(trained / "results" / run) for run in MODULES)
    assert one["data_digest"] == other["data_digest"]
    assert one["code_digest"] != other["code_digest"]
    assert (one["trainer"], other["trainer"]) == ("scratch", "trl")


def test_a_manifest_holds_the_digest_of_the_finished_metrics(trained):
    for folder in (trained / "results" / run for run in MODULES):
        assert manifest(folder)["metrics_sha256"] == sha256_of(folder / "metrics.csv")


def test_no_file_of_a_run_holds_the_hubs_token(trained):
    files = [path for path in trained.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def test_the_trained_model_loads_and_is_recorded(result, demo_model):
    folder = result / "model"
    verify(folder)
    start, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (demo_model, folder))
    moved = [name for name, p in trained.named_parameters() if not torch.equal(p, start.get_parameter(name))]
    assert len(moved) == len(list(start.named_parameters()))
    largest = max((p - start.get_parameter(n)).abs().max().item() for n, p in trained.named_parameters())
    peak = manifest(result)["settings"]["grpo"]["learning_rate"]
    assert 0.5 * peak < largest < 1.6 * peak  # AdamW moves a weight by the learning rate at most: 0, 1, 1/2 of the peak
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(demo_model).chat_template
    assert trained.dtype == start.dtype and trained.config.eos_token_id == start.config.eos_token_id


def test_tensorboard_gets_every_number(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run in MODULES:
        events = EventAccumulator(str(trained / "logs" / "tensorboard" / run)).Reload()
        rows = metrics(trained / "results" / run)
        known = {name for name in COLUMNS if name != "prompts" and rows[name].notna().any()}
        assert set(events.Tags()["scalars"]) == known
        assert [e.value for e in events.Scalars("reward")] == pytest.approx(rows["reward"].tolist(), rel=1e-4)
        assert [e.step for e in events.Scalars("reward")] == [1, 2, 3]


# In this process: changed settings


def train_here(trainer, settings, demo_model, demo_data, out, **grpo) -> pd.DataFrame:
    """Train with transformers as the sampler; the metrics."""
    run = project_settings.run_settings(settings, trainer)
    run["grpo"] = {**run["grpo"], **grpo}
    run["engine"]["name"] = "transformers"
    trainer_module(trainer).train(run, demo_model, demo_data, out, "none", checkpoint_every=0)
    return metrics(out)


def trainer_module(trainer):
    """TRL takes seconds to import, so only a test that trains with it does."""
    return importlib.import_module(MODULES[trainer])


@pytest.mark.parametrize("trainer", MODULES)
def test_full_scale_without_a_gpu_stops_before_anything_is_loaded(trainer, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings["scale"] = "full"
    with pytest.raises(SettingsError, match="scale: full needs an NVIDIA GPU, and torch sees none here"):
        train_here(trainer, settings, tmp_path / "no model", tmp_path / "no data", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


TIMES = ["seconds", "seconds_rollout", "seconds_reward", "seconds_train", "seconds_push", "seconds_step", "memory_gib"]


UNUSUAL = {  # no value is a default of TRL's, transformers' or config.yaml's
    "steps": 2, "prompts_per_step": 3, "group_size": 2, "max_tokens_per_micro_batch": 400, "max_completion_tokens": 19,
    "temperature": 0.9, "top_p": 0.95, "top_k": 300, "learning_rate": 3e-5, "lr_schedule": "cosine", "warmup_steps": 2,
    "max_grad_norm": 0.7, "epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5, "beta": 0.01, "loss_type": "dr_grpo",
    "kl_bias_correction": False, "importance_level": "sequence", "mask_truncated_completions": True,
    "updates_per_batch": 2, "old_logprobs": "recompute", "scale_rewards": "batch",
    "reward_weights": {"correct": 0.8, "format": 0.3}, "importance_cap": 2.0, "gradient_checkpointing": True,
    "precision": "bf16", "weights_dtype": "bf16", "lora_rank": 4, "lora_alpha": 24.0, "seed": 5,
}  # fmt: skip


@pytest.mark.parametrize("trainer", MODULES)
def test_every_setting_reaches_the_trainer(trainer, settings, demo_model, demo_data, tmp_path):
    assert [name for name, value in UNUSUAL.items() if same(value, settings["grpo"][name])] == []
    rows = train_here(trainer, settings, demo_model, demo_data, tmp_path, **UNUSUAL)
    used = manifest(tmp_path)["used"]
    differing = {name for name, value in UNUSUAL.items() if not same(value, used[name])}
    assert differing == set()
    assert len(rows) == 2 and (rows["completion_length_max"] <= 19).all()
    assert rows["kl"].notna().any() and used["sequences_per_step"] == 6  # a step without a whole completion has none


@pytest.mark.parametrize("trainer", MODULES)
def test_the_same_seed_gives_the_same_run_and_validation_leaves_it_alone(
    trainer, settings, demo_model, demo_data, tmp_path
):
    with_validation, without = (
        train_here(trainer, settings, demo_model, demo_data, tmp_path / str(every), evaluate_every=every)
        for every in (1, 0)
    )
    assert with_validation["validation_accuracy"].notna().all() and without["validation_accuracy"].isna().all()
    dropped = [*TIMES, "validation_accuracy"]
    pd.testing.assert_frame_equal(with_validation.drop(columns=dropped), without.drop(columns=dropped), rtol=1e-4)


def test_an_engine_that_is_never_pushed_to_falls_behind_and_smoke_says_so(settings, demo_model, demo_data, tmp_path):
    changes = {"learning_rate": 1e-3, "steps": 5}
    stale = train_here("scratch", settings, demo_model, demo_data, tmp_path / "stale", sync_every=0, **changes)
    synced = train_here("scratch", settings, demo_model, demo_data, tmp_path / "synced", **changes)
    assert synced["logprob_difference"].max() < 1e-4
    assert stale["logprob_difference"][0] < 1e-4
    assert stale["logprob_difference"][4] > 2 * stale["logprob_difference"][1] > 0.1
    assert [fault for fault in faults(stale, None) if "engine does not follow the trainer" in fault]
    assert faults(synced, None) == []


class Script:
    """Completions laid down in advance, for both trainers: right ones, wrong ones, cut ones, of many lengths."""

    name, gib = "scripted", 0.0

    def __init__(self, tokenizer, questions):
        self._gold = {tuple(ids): q["gold"] for q, ids in questions}
        self._tokenizer = tokenizer

    def completions(self, prompts: list[list[int]]) -> list[list[int]]:
        drawn = []
        for i, prompt in enumerate(prompts):
            rng = random.Random(f"{prompt} {i % 4}")
            text = f"{rng.randint(1, 99)} + {rng.randint(1, 9)} = {rng.randint(1, 99)}\n" * rng.randint(0, 1)
            answer = self._gold[tuple(prompt)] if rng.random() < 0.4 else rng.randint(1, 99)
            tokens = self._tokenizer.encode(text + f"#### {answer}" * rng.randint(0, 3))
            drawn.append([*tokens, self._tokenizer.eos_token_id][:24])
        return drawn

    def generate(self, prompts, sampling):
        repeated = [prompt for prompt in prompts for _ in range(sampling.n)]
        eos = self._tokenizer.eos_token_id
        flat = [Completion(ids, [0.0] * len(ids), ids[-1] != eos) for ids in self.completions(repeated)]
        return [flat[i : i + sampling.n] for i in range(0, len(flat), sampling.n)]

    def sleep(self):
        pass

    def load_weights(self, weights):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "max_tokens_per_micro_batch": 400},  # gradients add up over micro-batches
        {"loss_type": "cispo", "epsilon_high": 5.0, "updates_per_batch": 2, "old_logprobs": "recompute"},
        {"loss_type": "grpo", "importance_level": "sequence", "mask_truncated_completions": True},
        {"temperature": 0.7, "scale_rewards": "batch", "delta": 1.4, "updates_per_batch": 2,
         "old_logprobs": "recompute"},
        {"lora_rank": 4, "lora_alpha": 9.0, "learning_rate": 1e-3},
        {"lora_rank": 4, "precision": "bf16", "weights_dtype": "bf16", "gradient_checkpointing": True},
    ],
    ids=["dapo", "accumulation", "two updates a batch", "GSPO without truncated ones", "temperature, batch, delta",
         "LoRA", "bf16"],
)  # fmt: skip
def test_parity_of_whole_runs_from_the_same_rollouts(settings, demo_model, demo_data, tmp_path, monkeypatch, changes):
    """Sampler aside, every number that both trainers log is the same, step after step, and so are their models."""
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    rows = read_rows(demo_data / "train.jsonl")
    script = Script(tokenizer, [(q, tokenizer.encode(prompt_text(tokenizer, q["question"], ""))) for q in rows])
    monkeypatch.setattr(scratch, "build_engine", lambda *args, **kwargs: script)
    monkeypatch.setattr(scratch.Following, "check", lambda *_: None)  # the script knows no log-probs
    monkeypatch.setattr(
        GRPOTrainer, "_generate_single_turn", lambda self, prompts, *args, **kwargs: (script.completions(prompts), None)
    )
    changes = {
        "beta": 0.04, "lr_schedule": "cosine", "warmup_steps": 1, "steps": 4,
        "evaluate_every": 0, "max_grad_norm": 0.5, "learning_rate": 1e-4, "max_tokens_per_micro_batch": 10**6,
        **changes,
    }  # fmt: skip
    ours, theirs = (
        train_here(trainer, settings, demo_model, demo_data, tmp_path / trainer, **changes) for trainer in MODULES
    )
    assert 0 < ours["accuracy"].mean() < 1 and 0 < ours["truncated_share"].mean() < 1
    assert (ours["grad_norm"] > 0.5).any(), "no gradient was long enough to be clipped"
    assert ours["kl"].iloc[-1] > 1e-6
    of_sampler = ["logprob_difference", "kl_sampler", "sampler_ratio_max", "correction_mean", "corrected_share"]
    unshared = [*TIMES, *of_sampler, "validation_accuracy", "ratio_mean", "skipped"]
    rtol = 0.1 if changes.get("precision") == "bf16" else 1e-3
    # In bf16 the KL is little more than rounding.
    pd.testing.assert_series_equal(ours["kl"], theirs["kl"], rtol=3 * rtol, atol=1e-6)
    unshared += ["kl"] if "bf16" in changes.values() else []
    pd.testing.assert_frame_equal(ours.drop(columns=unshared), theirs.drop(columns=unshared), rtol=rtol, atol=1e-6)
    if "bf16" in changes.values():
        return

    start, our_model, their_model = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (demo_model, tmp_path / "scratch" / "model", tmp_path / "trl" / "model")
    )
    for name, weight in start.named_parameters():
        our_weight, their_weight = (m.get_parameter(name) for m in (our_model, their_model))
        assert (our_weight - their_weight).norm() < 1e-4 * their_weight.norm(), name
        # AdamW turns a rounding error of a gradient near 0 into a whole step of one weight, hence the room
        assert (our_weight - their_weight).norm() <= 0.02 * (their_weight - weight).norm(), name


# The reference of the KL


@pytest.mark.parametrize("trainer", MODULES)
@pytest.mark.parametrize(
    ("changes", "known"),
    [({}, False), ({"beta": 0.04}, True), ({"beta": 0.04, "lora_rank": 4, "learning_rate": 1e-2}, True)],
    ids=["none", "a copy", "LoRA with the adapter off"],
)
def test_kl_to_each_kind_of_reference(trainer, settings, demo_model, demo_data, tmp_path, changes, known):
    rows = train_here(trainer, settings, demo_model, demo_data, tmp_path, evaluate_every=0, **changes)
    if not known:
        assert rows["kl"].isna().all()
        return
    assert rows["kl"][0] == pytest.approx(0, abs=1e-6)  # both are still the start model
    assert rows["kl"][2] > 1e-5


@pytest.mark.parametrize("trainer", MODULES)
def test_lora_trains_its_adapters_alone_and_leaves_a_whole_model(trainer, settings, demo_model, demo_data, tmp_path):
    train_here(trainer, settings, demo_model, demo_data, tmp_path, lora_rank=2, learning_rate=1e-2)
    start, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (demo_model, tmp_path / "model"))
    moved = {name for name, p in trained.named_parameters() if (p - start.get_parameter(name)).abs().max() > 1e-5}
    linear = {f"{name}.weight" for name, m in start.model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert moved == {f"model.{name}" for name in linear}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.linalg.matrix_rank(trained.get_parameter(name) - start.get_parameter(name), rtol=1e-3) == 2


def test_an_engine_follows_a_lora_run(settings, demo_model, demo_data, tmp_path):
    rows = train_here("scratch", settings, demo_model, demo_data, tmp_path, lora_rank=4, learning_rate=1e-2, steps=4)
    assert rows["logprob_difference"].max() < 1e-4


# Ablations: what gives each away


def test_a_run_whose_engine_does_not_follow_stops_three_steps_later(
    settings, demo_model, demo_data, tmp_path, monkeypatch
):
    monkeypatch.setattr(scratch, "sync_weights_to_vllm", lambda model, engine: None)
    with pytest.raises(RunStopped, match=r"step 4: the engine does not follow the trainer\. Their log-probs have"):
        train_here("scratch", settings, demo_model, demo_data, tmp_path, steps=8, learning_rate=1e-3, group_size=8)
    assert len(metrics(tmp_path)) == 4


@pytest.mark.parametrize(
    ("differences", "stops_at"),
    [
        ([0.0069, 0.0066, 0.0093, 0.0049, 0.0078], None),  # as a bf16 engine's on a GPU
        ([1e-7, 4e-5, 2e-5, 9e-5, 1e-6], None),  # fp32 on a CPU
        ([0.007, 0.06, 0.06, 0.007, 0.06, 0.06], None),  # odd tokens now and then
        ([0.007, 0.03, 0.06, 0.08, 0.09], 5),  # left behind
        ([0.3, 0.3, 0.3], 3),  # never together: another temperature, say
        ([1e-6, None, 0.01, 0.02, 0.03], 5),  # a step without a single token to compare
    ],
)
def test_what_counts_as_following(differences, stops_at):
    following, stopped = Following(), None
    for step, difference in enumerate(differences, start=1):
        try:
            following.check(step, difference)
        except RunStopped:
            stopped = stopped or step
    assert stopped == stops_at


def test_an_engine_that_is_pushed_to_late_differs_in_between(settings, demo_model, demo_data, tmp_path):
    changes = {"learning_rate": 1e-3, "steps": 5, "sync_every": 2, "group_size": 8}  # no step without a gradient
    difference = train_here("scratch", settings, demo_model, demo_data, tmp_path, **changes)["logprob_difference"]
    assert difference[[0, 2, 4]].max() < 1e-4 < 1e-2 < difference[[1, 3]].min()


@pytest.mark.parametrize("trainer", MODULES)
def test_bf16_weights_hardly_move(trainer, settings, demo_model, demo_data, tmp_path):
    changes = {"learning_rate": 1e-5, "evaluate_every": 0, "precision": "bf16"}
    full, half = (
        train_here(trainer, settings, demo_model, demo_data, tmp_path / dtype, weights_dtype=dtype, **changes)
        for dtype in ("fp32", "bf16")
    )
    assert full["weights_moved"].min() > 0.95
    assert 0 < half["weights_moved"].max() < 0.3
    assert manifest(tmp_path / "bf16")["used"]["weights_dtype"] == "bf16"


def test_bf16_weights_are_warned_of(settings, demo_model, demo_data, tmp_path):
    with pytest.warns(UserWarning, match=r"weights_dtype: bf16 rounds an update away .* weights_moved"):
        train_here(
            "scratch", settings, demo_model, demo_data, tmp_path, weights_dtype="bf16", precision="bf16", steps=1
        )


def test_a_penalty_holds_the_policy_to_the_start_model(settings, demo_model, demo_data, tmp_path):
    loose, tight = (
        train_here(
            "scratch", settings, demo_model, demo_data, tmp_path / str(beta), beta=beta, steps=6, learning_rate=1e-3
        )
        for beta in (1e-6, 3.0)
    )
    assert tight["kl"][5] < 0.5 * loose["kl"][5]


def test_the_samplers_logprobs_as_old_ones_show_a_stale_engine_in_the_ratio(settings, demo_model, demo_data, tmp_path):
    changes = {"learning_rate": 1e-3, "steps": 4, "sync_every": 0}
    sampler, detach = (
        train_here("scratch", settings, demo_model, demo_data, tmp_path / old, old_logprobs=old, **changes)
        for old in ("sampler", "detach")
    )
    # The mean of the ratios is near 1 whatever the policy is, but exactly 1 for one policy alone.
    assert (detach["ratio_mean"] == 1).all() and (sampler["ratio_mean"][1:] - 1).abs().max() > 1e-4
    assert sampler["logprob_difference"][3] > 0.01  # smoke's evidence is there in both
    assert [fault for fault in faults(sampler, None) if "engine does not follow the trainer" in fault]


@pytest.mark.parametrize(("setting", "value"), [("top_k", 1), ("top_p", 0.01)])
def test_sampling_only_the_best_token_leaves_nothing_to_compare(
    settings, demo_model, demo_data, tmp_path, setting, value
):
    for trainer in MODULES:
        changes = {setting: value, "steps": 1, "evaluate_every": 0}
        rows = train_here(trainer, settings, demo_model, demo_data, tmp_path / trainer, **changes)
        assert rows["degenerate_groups"][0] == 1.0


def test_bf16_autocast_is_used(settings, demo_model, demo_data, tmp_path):
    rows = train_here("scratch", settings, demo_model, demo_data, tmp_path, precision="bf16", steps=1)
    assert 1e-5 < rows["logprob_difference"][0] < 0.05  # the sampler is in bf16 throughout, the trainer in part


def test_a_model_that_caps_its_logits_is_refused(settings, demo_model, demo_data, tmp_path, monkeypatch):
    """Its own log-probs are not those of hidden states and head, so they are compared before anything is trained."""
    forward = Qwen3ForCausalLM.forward

    def capped(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = 2 * torch.tanh(output.logits / 2)
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", capped)
    with pytest.raises(ModelFilesError, match=r"qwen3: log-probs .* differ from the model's own by"):
        train_here("scratch", settings, demo_model, demo_data, tmp_path)


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_spoils_the_weights(
    settings, demo_model, demo_data, tmp_path, monkeypatch
):
    monkeypatch.setattr(scratch, "group_advantages", lambda rewards, scale: torch.full_like(rewards, math.nan))
    with pytest.raises(RunStopped, match=r"step 1: the gradient is nan; lower learning_rate"):
        train_here("scratch", settings, demo_model, demo_data, tmp_path)


def test_the_mean_over_sequences_weighs_short_completions_more(settings, demo_model, demo_data, tmp_path):
    """The first step draws and scores the same; only the loss differs."""
    tokens, sequences = (
        train_here("scratch", settings, demo_model, demo_data, tmp_path / kind, loss_type=kind, steps=1).loc[0]
        for kind in ("dapo", "grpo")
    )
    assert tokens["reward"] == sequences["reward"] and tokens["advantage_std"] > 0
    assert abs(tokens["loss"]) > 1e-4 > 1e-6 > abs(sequences["loss"])  # advantages of a group add up to 0


# Bad input


def failing(monkeypatch, trainer, reward, every):
    """Let every n-th call of the grader do what `reward` does."""
    module, name = {"scratch": (scratch, "total_reward"), "trl": (trainer_module("trl"), "score_correct")}[trainer]
    sound, calls = getattr(module, name), itertools.count(1)
    monkeypatch.setattr(module, name, lambda *args: sound(*args) if next(calls) % every else reward())


def raising():
    raise ZeroDivisionError("division by zero")


FAULTS = {
    "raises": (raising, "ZeroDivisionError: division by zero"),
    "None": (lambda: None, "the reward is None"),
    "NaN": (lambda: float("nan"), "the reward is nan"),
}


@pytest.mark.parametrize("trainer", MODULES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails_now_and_then_is_counted_and_named(
    trainer, settings, demo_model, demo_data, tmp_path, monkeypatch, capsys, fault
):
    reward, said = FAULTS[fault]
    failing(monkeypatch, trainer, reward, every=24)
    rows = train_here(trainer, settings, demo_model, demo_data, tmp_path, prompts_per_step=6, steps=2)
    assert rows["bad_rewards"].tolist() == [1, 1]  # of 24
    assert np.isfinite(rows[["reward", "loss", "grad_norm"]].to_numpy()).all()
    assert re.search(
        rf"rewards: 1 of 24 completions got no reward; a completion of train-\d+: {said}", capsys.readouterr().out
    )


@pytest.mark.parametrize("trainer", MODULES)
def test_rewards_that_fail_too_often_end_the_run(trainer, settings, demo_model, demo_data, tmp_path, monkeypatch):
    """Each counts, though they answer the same few questions."""
    failing(monkeypatch, trainer, raising, every=2)
    with pytest.raises(RunStopped, match=r"8 of 16 completions got no reward; .*More than 5% of a step"):
        train_here(trainer, settings, demo_model, demo_data, tmp_path)


def test_a_step_without_any_difference_in_reward_is_skipped_and_said(
    settings, demo_model, demo_data, tmp_path, monkeypatch, capsys
):
    """TRL updates all the same, and AdamW's momentum then moves the weights."""
    equal = {"total": 1.0, "correct": 1.0, "format": 0.0, "truncated": False}
    monkeypatch.setattr(scratch, "total_reward", lambda *args: equal)
    rows = train_here("scratch", settings, demo_model, demo_data, tmp_path, steps=2)
    assert rows["skipped"].tolist() == [1, 1] and rows["degenerate_groups"].tolist() == [1.0, 1.0]
    assert rows["weights_moved"].tolist() == rows["grad_norm"].tolist() == rows["loss"].tolist() == [0.0, 0.0]
    assert rows["entropy"].notna().all() and rows["logprob_difference"].max() < 1e-4  # still measured
    said = capsys.readouterr().out
    assert "step    1  the completions of each question all earned the same" in said
    assert "step    1  no gradient: the weights stay as they are" in said
    start, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (demo_model, tmp_path / "model"))
    assert all(torch.equal(p, start.get_parameter(name)) for name, p in trained.named_parameters())


@pytest.mark.parametrize("trainer", MODULES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_of_truncated_completions_is_finite_and_said(
    trainer, settings, demo_model, demo_data, tmp_path, capsys, masked
):
    changes = {"max_completion_tokens": 1, "evaluate_every": 0, "mask_truncated_completions": masked}
    rows = train_here(trainer, settings, demo_model, demo_data, tmp_path, **changes)
    assert (rows["truncated_share"] == 1).all()
    assert np.isfinite(rows[["loss", "grad_norm"]].to_numpy()).all()
    assert "every completion was cut at max_completion_tokens, so few can be right; raise it" in capsys.readouterr().out


def test_training_on_a_changed_model_is_refused(settings, demo_model, demo_data, tmp_path):
    folder = shutil.copytree(demo_model, tmp_path / "demo")
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    for trainer in MODULES:
        with pytest.raises(ModelFilesError, match=r"config\.json has [\d,]+ bytes, not"):
            train_here(trainer, settings, folder, demo_data, tmp_path / "out")
    assert not (tmp_path / "out" / "metrics.csv").exists()


# The clock


@pytest.fixture
def wait(monkeypatch):
    """Moves the clock's time on by so many seconds."""
    now = [100.0]
    monkeypatch.setattr("scripts.run_record.time.perf_counter", lambda: now[0])

    def moved(seconds: float) -> None:
        now[0] += seconds

    return moved


def test_a_phase_inside_a_phase_is_counted_once(wait):
    clock = Clock()
    with clock("rollout"):
        with clock("push"):
            wait(5)
        wait(2)
    wait(1)
    with clock("push"):
        wait(4)
    assert clock.take() == {"seconds_push": 9, "seconds_rollout": 2, "seconds_step": 12}
    assert clock.take() == {"seconds_step": 0}


def test_what_happens_while_the_clock_is_stopped_is_in_no_column(wait):
    """TRL's sampler pushes weights before it answers the validation questions; that push is not the step's."""
    clock = Clock()
    with clock("push"):
        wait(2)
    with clock.stopped():
        with clock("push"):
            wait(5)
        wait(5)
    wait(1)
    assert clock.take() == {"seconds_push": 2, "seconds_step": 3}


# Smoke checks


HEALTHY = {
    "step": [1, 2, 3],
    "reward": [0.2, 0.3, 0.4],
    "accuracy": [0.2, 0.3, 0.4],
    "degenerate_groups": [1.0, 0.5, 0.0],
    "grad_norm": [0.0, 0.5, 0.4],
    "loss": [0.0, 0.01, -0.01],
    "kl": [np.nan] * 3,
    "ratio_mean": [1.0, 1.0, 1.0],
    "correction_mean": [0.9, 1.1, 1.2],
    "logprob_difference": [0.004, 0.009, 0.006],
    "truncated_share": [0.1, 0.0, 0.1],
    "memory_gib": [10.0, 12.0, 12.0],
    "seconds_step": [1.0, 1.0, 1.0],
    "prompts": ["a", "b", "c"],
}


@pytest.mark.parametrize(
    ("changes", "device_gib", "said"),
    [
        ({"degenerate_groups": [1.0] * 3}, None, "every group got equal rewards in every step"),
        ({"grad_norm": [0.5, np.inf, 0.1]}, None, "values that are no numbers in grad_norm"),
        ({"loss": [0.0, np.nan, 0.1]}, None, "values that are no numbers in loss"),
        ({"grad_norm": [0.0] * 3}, None, "the gradient is 0 in every step"),
        ({"ratio_mean": [1.0, 1.2, 1.0]}, None, "ratio_mean leaves 1 +- 0.1 (up to 1.200)"),
        ({"correction_mean": [1.0, 0.3, 1.0]}, None, "correction_mean leaves 1 +- 0.5 (up to 0.300)"),
        ({"logprob_difference": [0.004, 0.06, 0.2]}, None, "log-probs differ by up to 0.200 nats"),
        ({"memory_gib": [10.0, 23.5, 12.0]}, 24.0, "memory is nearly full (23.5 of 24.0 GiB)"),
    ],
)
def test_smoke_names_a_fault(changes, device_gib, said):
    found = faults(pd.DataFrame(HEALTHY | changes), device_gib)
    assert len(found) == 1 and said in found[0], found


def test_smoke_is_silent_on_healthy_runs(result):
    assert faults(pd.DataFrame(HEALTHY), 24.0) == []
    assert faults(metrics(result), None) == []


def test_smokes_command_line(trained, tmp_path):
    paths = [trained / "results" / run / "metrics.csv" for run in MODULES]
    out = tmp_path / "smoke.json"
    said = run_module("scripts.smoke", *paths, "--out", out)
    assert "scratch: sound (3 steps" in said and "trl: sound (3 steps" in said
    assert "this trainer cannot know ratio_mean, logprob_difference" in said
    assert json.loads(out.read_text()) == {"scratch": [], "trl": []}


def test_trls_train_phase_is_what_the_others_leave_whatever_memory_is_in_use():
    columns = {"seconds_rollout": 2.0, "seconds_push": 0.25, "seconds_step": 3.0, "memory_gib": 30.0}
    assert trainer_module("trl").seconds_left(columns) == 0.75


def test_a_sleeping_engine_of_trl_is_awake_for_a_validation_and_sleeps_again(monkeypatch):
    trl, calls = trainer_module("trl"), []
    llm = SimpleNamespace(
        wake_up=lambda tags: calls.append(f"wake {tags[0]}"), sleep=lambda level: calls.append(f"sleep {level}")
    )
    engine = SimpleNamespace(
        enable_sleep_mode=True, llm=llm, sync_weights=lambda: calls.append("push"), _llm_weights_sleeping=False
    )
    trainer = SimpleNamespace(use_vllm=True, vllm_generation=engine, eos_token_ids=[2])
    monkeypatch.setattr(trl, "vllm_generate", lambda *args: calls.append("sample"))
    trl.OwnSampler(trainer).generate([[1]], Sampling(1, 5))
    assert calls == ["push", "wake kv_cache", "sample", "sleep 2"]
    assert engine._llm_weights_sleeping  # so that TRL pushes before it samples next


# Evaluation


@pytest.mark.parametrize("samples", [1, 4])
def test_evaluation_counts_agree_with_its_samples(settings, trained, demo_data, tmp_path, samples):
    settings["engine"]["name"] = "transformers"
    settings["evaluation"] |= {"samples": samples, "temperature": 0.8}
    model = trained / "results" / "scratch" / "model"
    result = evaluate(settings, "scratch", model, demo_data, tmp_path)
    assert json.loads((tmp_path / "eval.json").read_text()) == json.loads(json.dumps(result))
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    questions = read_rows(demo_data / "test.jsonl")
    assert [row["id"] for row in rows] == [q["id"] for q in questions]
    assert result["rows"] == len(rows) == 20
    for row, q in zip(rows, questions, strict=True):
        assert (row["question"], row["gold"]) == (q["question"], q["gold"])
        assert row["correct"] == (correctness_reward(row["completion"], q["gold"]) == 1.0)
        assert row["strict"] == strict_match(row["completion"], q["gold"])
        assert row["answer"] is None or isinstance(row["answer"], str)
    assert result["flexible"] == with_interval(sum(row["correct"] for row in rows), 20)
    assert result["strict"] == with_interval(sum(row["strict"] for row in rows), 20)
    assert result["truncated"]["count"] == sum(row["truncated"] for row in rows)
    assert result["truncated"]["share"] == pytest.approx(result["truncated"]["count"] / 20)
    assert sum(result["answer_kinds"].values()) == 20
    assert result["completion_length_mean"] == pytest.approx(sum(row["tokens"] for row in rows) / 20)
    assert all(row["tokens"] <= 24 for row in rows)
    assert all(row["tokens"] == 24 for row in rows if row["truncated"])
    assert ("sampled" in result) == (samples > 1)
    if samples > 1:
        right = [row["sampled_correct"] for row in rows]
        assert result["sampled"]["pass_at_k"]["1"] == pytest.approx(sum(right) / 80)
        assert result["sampled"]["pass_at_k"]["4"] == pytest.approx(sum(r > 0 for r in right) / 20)
        assert result["sampled"]["majority"]["correct"] == sum(row["majority_correct"] for row in rows)


def test_the_interval_is_wilsons():
    """8 of 10: 0.490 to 0.943, the textbook's example; also worked out from the formula."""
    z = 1.959963984540054
    for correct, rows in ((8, 10), (0, 20), (20, 20), (593, 1319)):
        p = correct / rows
        centre = (p + z * z / (2 * rows)) / (1 + z * z / rows)
        half = z / (1 + z * z / rows) * np.sqrt(p * (1 - p) / rows + z * z / (4 * rows * rows))
        found = with_interval(correct, rows)
        assert (found["correct"], found["accuracy"]) == (correct, p)
        assert (found["low"], found["high"]) == pytest.approx((centre - half, centre + half), abs=1e-9)
    assert with_interval(8, 10) == {
        "correct": 8, "accuracy": 0.8, "low": pytest.approx(0.4901625), "high": pytest.approx(0.9433178)
    }  # fmt: skip


@pytest.mark.parametrize(("n", "correct"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_answer(n, correct):
    answers = [True] * correct + [False] * (n - correct)
    for k in powers(n):
        choices = list(itertools.combinations(answers, k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_the_majority_answers_for_a_question():
    def group(*texts):
        return graded_group([Sample({"gold": "12"}, [], Completion([], [], False), text) for text in texts])

    assert group("#### 12", "#### 12.0", "#### 7") == {
        "sampled_correct": 2, "majority_answer": "12", "majority_correct": True
    }  # fmt: skip
    assert group("#### 7", "#### 7", "#### 12")["majority_correct"] is False
    assert group("no idea", "nor I") == {"sampled_correct": 0, "majority_answer": None, "majority_correct": False}
    assert powers(1) == [1] and powers(8) == [1, 2, 4, 8] and powers(6) == [1, 2, 4, 6]


def test_numbers_are_shown_as_people_write_them():
    assert [shown(Fraction(*v)) for v in ((1200, 1), (-3, 1), (1, 4), (1, 3))] == ["1200", "-3", "0.25", "1/3"]
