"""The benchmark of a step, really run on the demo's scale, and the arithmetic of its table."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import ROOT, run_module
from safetensors import safe_open

from benchmarks import random_model
from benchmarks.gpu import gpu_memory, least_bytes, least_seconds
from benchmarks.step_time import MODULES, PHASES, WARM_UP, chosen_runs, summary, table, train
from scripts.prepared import verify
from scripts.settings import SettingsError

SMALL = [
    "scale=demo", "grpo.prompts_per_step=2", "grpo.group_size=2", "grpo.max_completion_tokens=8",
    "engine.name=transformers",
]  # fmt: skip


@pytest.fixture(scope="module")
def measured(demo_model, demo_data, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a benchmark of both trainers, 2 steps and 1 repeat, and what it printed."""
    out = tmp_path_factory.mktemp("benchmark") / "demo"
    arguments = ["--model", demo_model, "--data", demo_data, "--steps", 2, "--repeats", 1, "--set", *SMALL]
    return out, run_module("benchmarks.step_time", *arguments, "--out", out)


def test_the_table_holds_the_medians_of_the_kept_metrics(measured):
    out, said = measured
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text in said and "2 trainings (scratch, trl in turns) of 3 + 2 steps" in said
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    medians = {}
    for cells in lines[2:]:
        row = dict(zip(lines[0], cells, strict=True))
        whole = pd.read_csv(out / f"{row['run']}-1.csv")
        assert len(whole) == WARM_UP + 2
        last = whole.iloc[-2:]
        medians[row["run"]] = last["seconds_step"].median()
        assert row["s a step"] == f"{medians[row['run']]:.3f}"
        assert row["spread"] == f"{row['s a step']} to {row['s a step']}"
        for phase in PHASES:
            median = last[f"seconds_{phase}"].median()
            assert row[phase] == ("–" if pd.isna(median) else f"{median:.3f}")
        assert row["tokens/s"] == f"{(last['tokens'] / last['seconds_step']).median():.0f}"
        assert row["tokens a step"] == f"{last['tokens'].median():.0f}"
    assert list(medians) == ["scratch", "trl"]
    ratio = f"{medians['scratch'] / medians['trl']:.3f}"
    assert f"\nscratch / trl: {ratio} ({ratio} to {ratio})\n" in text


def test_it_leaves_numbers_and_manifests_but_no_models(measured):
    out, _ = measured
    endings = ("csv", "json", "log")
    kept = {f"{run}-1.{ending}" for run in ("scratch", "trl") for ending in endings} | {"table.md", "numbers.json"}
    assert {path.name for path in out.iterdir()} == kept
    numbers = json.loads((out / "numbers.json").read_text(encoding="utf-8"))
    assert numbers["overrides"] == SMALL and "benchmarks.step_time" in numbers["command"]
    for run, found in numbers["runs"].items():
        manifest = json.loads((out / f"{run}-1.json").read_text(encoding="utf-8"))
        assert numbers["versions"] == manifest["versions"]
        assert manifest["used"]["group_size"] == 2 and manifest["settings"]["grpo"]["evaluate_every"] == 0
        assert found["peak_gib"] > 0 and found["steps"] == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grpo.group_sise=4", "grpo.group_sise: unknown setting; did you mean group_size?"),
        ("engine.memory_gib=much", "engine.memory_gib: 'much' is text, not a number"),
        ("grpo.top_p.x=1", "grpo.top_p: "),
        ("grpo.top_p", "--set grpo.top_p: write section.key=value"),
        ("grpo.top_p=[", "--set grpo.top_p=[: '[' is no YAML value"),
        ("grpo.steps=9", "--set grpo.steps=9: the benchmark sets it; give --steps for the length"),
    ],
)
def test_a_wrong_override_is_named(override, said):
    with pytest.raises(SettingsError) as error:
        chosen_runs(["scratch"], ROOT / "config.yaml", ["scale=demo", override], 5)
    assert said in str(error.value)


def test_overrides_reach_every_run():
    overrides = ["scale=demo", "grpo.reward_weights={correct: 1.0, format: 0.5}", "engine.memory_gib=2"]
    runs = chosen_runs(["trl", "scratch-kl"], ROOT / "config.yaml", overrides, 5)
    assert list(runs) == ["trl", "scratch-kl"]
    for settings in runs.values():
        assert settings["grpo"]["reward_weights"]["format"] == 0.5 and settings["grpo"]["steps"] == 5
        assert settings["engine"]["memory_gib"] == 2.0
    with pytest.raises(SettingsError, match="no run 'scrach'"):
        chosen_runs(["scrach"], ROOT / "config.yaml", [], 5)
    with pytest.raises(SettingsError, match="scratch-2 trains in several processes"):
        chosen_runs(["scratch-2"], ROOT / "config.yaml", [], 5)


def test_a_training_that_fails_ends_it_with_the_logs_last_line(tmp_path, monkeypatch):
    monkeypatch.setitem(MODULES, "scratch", "scripts.none")
    settings = chosen_runs(["scratch"], ROOT / "config.yaml", ["scale=demo"], 5)["scratch"]
    with pytest.raises(SystemExit) as ended:
        train(settings, tmp_path / "model", tmp_path / "data", tmp_path / "scratch-1")
    log = tmp_path / "scratch-1.log"
    assert "No module named scripts.none" in log.read_text(encoding="utf-8").splitlines()[-1]
    assert str(ended.value).startswith(f"scratch ended with exit code 1; see {log}:\n")
    assert str(ended.value).endswith("No module named scripts.none")
    assert [path.name for path in tmp_path.iterdir()] == ["scratch-1.log"]


def test_least_bytes_of_a_rollout_by_hand():
    shape = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4}
    tied = SimpleNamespace(**shape, num_key_value_heads=2, head_dim=5, tie_word_embeddings=True)
    # 7 decode steps read 1000 weights of 2 bytes. 6 sequences of 4 tokens look at 1 + 2 + 3 + 4 = 10 tokens each, and a
    # token is keys and values (2) of 3 layers, 2 heads, 5 numbers, 2 bytes: 120 bytes.
    assert least_bytes(tied, 1000, 6, 4.0, 7) == 14000 + 6 * 10 * 120
    # A head of its own: the embedding's 10 x 8 numbers are not read. 4 heads of 8 / 4 numbers: 96 bytes a token.
    apart = SimpleNamespace(**shape, tie_word_embeddings=False)
    assert least_bytes(apart, 1000, 6, 4.0, 7) == 7 * 920 * 2 + 6 * 10 * 96


def test_least_seconds_count_the_models_weights_once(demo_model):
    config = json.loads((demo_model / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"]
    with safe_open(demo_model / "model.safetensors", framework="numpy") as weights:
        names = weights.keys()
        numbers = sum(weights.get_tensor(name).size for name in names)
    frame = pd.DataFrame({"completion_length_mean": [1.0, 3.0], "completion_length_max": [1, 5]})
    of_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    seconds = least_seconds(demo_model, {"prompts_per_step": 2, "group_size": 4}, frame, 10.0)
    assert list(seconds) == [(2 * numbers + 8 * of_token) / 10, (10 * numbers + 8 * 6 * of_token) / 10]
    assert least_seconds(demo_model, {}, frame, None) is None


def test_gpu_memory_is_what_came_on_top_on_the_visible_gpu(monkeypatch):
    used = iter([5 * 2**30, 7 * 2**30, 6 * 2**30])
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=next(used, 0) if gpu == 3 else 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with gpu_memory() as sampled:
        while len(sampled) < 3:
            time.sleep(0.01)
    assert max(sampled) == 2.0


def rows(seconds: list[float], degenerate: float = 0.0) -> pd.DataFrame:
    """Rows of metrics.csv, without a push; half of each step is rollout."""
    frame = pd.DataFrame({"seconds_step": seconds, "tokens": 100, "memory_gib": 1.5, "degenerate_groups": degenerate})
    frame["seconds_rollout"] = frame["seconds_step"] / 2
    frame[["seconds_reward", "seconds_train"]] = 0.25
    return frame.assign(seconds_push=float("nan"))


def test_medians_spread_ratio_and_roofline_of_known_rows():
    first = summary([rows([1.0, 2.0, 3.0]), rows([2.0, 4.0, 9.0])], [5.0, 7.0], pd.Series([0.125] * 6))
    second = summary([rows([4.0, 4.0, 4.0]), rows([5.0, 5.0, 5.0], degenerate=1.0)], [0.0, 0.0], None)
    assert table({"a": first, "b": second | {"roofline": 0.5}}).splitlines() == [
        "| run | s a step | spread | rollout | reward | train | push | tokens/s | tokens a step | peak GiB "
        "| of roofline |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        # seconds 1 2 2 3 4 9; tokens/s 100 50 50 33 25 11; shares 1/4 1/8 1/12 1/8 1/16 1/36
        "| a | 2.500 | 2.000 to 4.000 | 1.250 | 0.250 | 0.250 | – | 42 | 100 | 7.0 | 10% |",
        "| b | 4.500 | 4.000 to 5.000 | 2.250 | 0.250 | 0.250 | – | 22 | 100 | 1.5 | 50% |",
        "",
        "a / b: 0.556 (0.500 to 0.800)",
        "",
        "Steps in which all completions of each group earned the same: a 0 of 6, b 3 of 6. By hand these have no "
        "backward pass, unless grpo.beta is above 0.",
    ]
    assert "of roofline" not in table({"b": second}) and " / " not in table({"b": second})
    assert "earned the same" not in table({"a": first})


def test_a_random_model_is_a_prepared_model(demo_model, tmp_path, monkeypatch):
    tiny = {"vocab_size": 1024, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    tiny |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": None, "eos_token_id": 2}
    monkeypatch.setattr(random_model, "SHAPE", random_model.SHAPE | tiny)
    random_model.make(demo_model, tmp_path / "random")
    verify(tmp_path / "random")
    assert json.loads((tmp_path / "random" / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "random" / name).read_bytes() == (demo_model / name).read_bytes()


def test_by_chance_a_model_that_gets_nothing_right_learns(demo_model, demo_data, tmp_path):
    arguments = ["--model", demo_model, "--data", demo_data, "--steps", 1, "--repeats", 1, "--chance"]
    run_module("benchmarks.step_time", *arguments, "--set", *SMALL, "grpo.group_size=8", "--out", tmp_path / "out")
    for run in MODULES:
        metrics = pd.read_csv(tmp_path / "out" / f"{run}-1.csv")
        assert metrics["accuracy"].between(0.05, 0.95).all() and (metrics["grad_norm"] > 0).all()
