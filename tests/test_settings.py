"""What a person meets who edits config.yaml."""

import copy
from pathlib import Path

import pytest
import yaml

from scripts.settings import SettingsError, as_text, load, run_settings

CONFIG = yaml.safe_load((Path(__file__).parents[1] / "config.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def config():
    return copy.deepcopy(CONFIG)


def faults(config) -> list[str]:
    with pytest.raises(SettingsError) as error:
        load(config, "demo")
    return str(error.value).splitlines()


def test_the_config_that_we_ship_is_sound_on_both_scales(config):
    assert load(config, "full")["model"]["name"] == "Qwen/Qwen3-0.6B"
    assert load(config, "demo")["model"]["source"] == "builtin"


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("grpo", "learning_rat", 1.0, "grpo.learning_rat: unknown setting; did you mean learning_rate?"),
        ("grpo", "learning_rate", "1e-6", "grpo.learning_rate: '1e-6' is text, not a number (write 1.0e-6)"),
        ("grpo", "learning_rate", "2E6", "grpo.learning_rate: '2E6' is text, not a number (write 2.0e+6)"),
        ("grpo", "learning_rate", "fast", "grpo.learning_rate: 'fast' is text, not a number"),
        ("grpo", "steps", 0, "grpo.steps: 0 is too small (at least 1)"),
        ("grpo", "steps", 2.5, "grpo.steps: 2.5 is not a whole number"),
        ("grpo", "steps", True, "grpo.steps: true is not a whole number"),
        ("grpo", "temperature", None, "grpo.temperature: nothing is not a number"),
        ("grpo", "temperature", float("nan"), "grpo.temperature: NaN is not a number"),
        ("grpo", "learning_rate", float("inf"), "grpo.learning_rate: Infinity is not a number"),
        ("grpo", "top_p", 1.5, "grpo.top_p: 1.5 is too large (at most 1)"),
        ("grpo", "epsilon", 0, "grpo.epsilon: 0 is too small (more than 0)"),
        (
            "grpo",
            "loss_type",
            "dapa",
            "grpo.loss_type: 'dapa' is not one of grpo, bnpo, dr_grpo, dapo, cispo; did you mean dapo?",
        ),
        (
            "grpo",
            "steps",
            {"full": 5},
            "grpo.steps: has no value for demo (write {full: A, demo: B}, or one value for both)",
        ),
        ("engine", "memory_gib", "4", "engine.memory_gib: '4' is text, not a number (write 4)"),
        ("model", "name", "", "model.name: is empty"),
        ("report", "runs", ["scratch", "tlr"], "report.runs: there is no run 'tlr'; did you mean trl?"),
    ],
)
def test_a_wrong_value_is_said_in_one_line(config, section, key, value, said):
    config[section][key] = value
    assert faults(config) == [said]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"updates_per_batch": 2},
            "old_logprobs: detach is exact for one update a batch, and updates_per_batch is 2; set recompute",
        ),
        (
            {"old_logprobs": "sampler", "importance_correction": "token_mask"},
            "old_logprobs: with sampler the ratio already makes up for the sampler; set importance_correction: none",
        ),
        (
            {"loss_type": "cispo"},
            "epsilon_high: with loss_type: cispo it caps the ratio itself, so 0.28 would cut every token; set 5.0",
        ),
        (
            {"delta": 1.2},
            "delta: 1.2 must lie above 1 + epsilon_high (1.28), and loss_type: cispo has none; set null",
        ),
        (
            {"beta": 0.1, "kl_estimator": "k1", "kl_bias_correction": False},
            "kl_estimator: k1 has no gradient without kl_bias_correction: true; set that, or k3",
        ),
        (
            {"weights_dtype": "bf16", "precision": "fp32"},
            "precision: weights in bf16 compute in bf16; set precision: bf16",
        ),
        ({"warmup_steps": 999}, "warmup_steps: 999 is more than the 5 steps of the run"),
        ({"reward_weights": {"correct": 0.0, "format": 0.0}}, "reward_weights: all are 0, so no completion is better "
                                                              "than another"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_named(config, changes, said):
    config["runs"] = {"mine": {"trainer": "scratch", "steps": 5, **changes}}
    config["report"]["runs"] = ["mine"]
    assert faults(config) == [f"runs.mine.{said}"]


def test_what_both_trainers_share_must_be_what_both_can(config):
    config["runs"] = {"mine": {"trainer": "scratch"}}
    config["report"]["runs"] = ["mine"]
    config["grpo"]["sync_every"] = 0
    assert faults(config) == [
        "grpo.sync_every: TRL pushes before every rollout; leave it at 1, or set it for a run with trainer: scratch"
    ]


def test_every_run_that_we_name_is_sound_and_differs_from_the_shared_settings(config):
    full, demo = load(config, "full"), load(copy.deepcopy(CONFIG), "demo")
    for name in config["runs"].keys() - {"scratch", "trl"}:
        assert full["runs"][name]["grpo"] != full["grpo"], name
        # there is no vLLM correction to switch off where TRL samples by itself
        assert demo["runs"][name]["grpo"] != demo["grpo"] or name == "trl-uncorrected"


@pytest.mark.parametrize(
    ("name", "run", "said"),
    [
        ("hot", {"trainer": "trll"}, "runs.hot.trainer: 'trll' is not one of scratch, trl; did you mean trl?"),
        ("hot", {"steps": 5}, "runs.hot.trainer: missing"),
        ("hot", {"trainer": "trl", "epsilo": 1}, "runs.hot.epsilo: unknown setting; did you mean epsilon?"),
        ("hot", {"trainer": "scratch", "steps": -1}, "runs.hot.steps: -1 is too small (at least 1)"),
        ("../up", {"trainer": "trl"}, "runs: '../up' is no name for a run (letters, digits, '.', '_' and '-')"),
        ("baseline", {"trainer": "trl"}, "runs.baseline: this name is the pipeline's own; choose another"),
        (
            "stale",
            {"trainer": "trl", "sync_every": 0},
            "runs.stale.sync_every: TRL pushes before every rollout; leave it at 1, or set it for a run with "
            "trainer: scratch",
        ),
        (
            "k2",
            {"trainer": "trl", "kl_estimator": "k2"},
            "runs.k2.kl_estimator: TRL has k3 only; leave it at k3, or set it for a run with trainer: scratch",
        ),
        (
            "old",
            {"trainer": "trl", "old_logprobs": "sampler", "importance_correction": "none"},
            "runs.old.old_logprobs: TRL has no sampler; take another, or set it for a run with trainer: scratch",
        ),
    ],
)
def test_a_wrong_run_is_named(config, name, run, said):
    config["runs"][name] = run
    assert faults(config) == [said]


def test_all_faults_are_said_at_once(config):
    config["grpo"]["steps"] = 0
    config["modle"] = {}
    del config["engine"]["name"]
    assert sorted(faults(config)) == [
        "engine.name: missing",
        "grpo.steps: 0 is too small (at least 1)",
        "modle: unknown setting; did you mean model?",
    ]


def test_a_run_overrides_shared_settings_and_leaves_the_others_alone(config):
    config["runs"]["hot"] = {"trainer": "scratch", "learning_rate": 1, "reward_weights": {"format": 0.5}}
    settings = load(config, "demo")
    assert settings["runs"]["hot"]["grpo"]["learning_rate"] == 1.0
    assert settings["runs"]["hot"]["grpo"]["reward_weights"] == {"correct": 1.0, "format": 0.5}
    assert settings["runs"]["trl"] == load(copy.deepcopy(CONFIG), "demo")["runs"]["trl"]


def test_order_and_way_of_writing_a_number_change_nothing(config):
    before = as_text(run_settings(load(config, "demo"), "trl"))
    config["grpo"] = dict(reversed(config["grpo"].items())) | {"temperature": 1}
    assert as_text(run_settings(load(config, "demo"), "trl")) == before
