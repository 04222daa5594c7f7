"""What a person meets who edits config.yaml."""

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from scripts.settings import SettingsError, as_text, load, read, run_settings

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "config.yaml").read_text(encoding="utf-8")
CONFIG = yaml.safe_load(TEXT)


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
        ("grpo", "temperature", 0, "grpo.temperature: 0 is too small (more than 0)"),
        ("grpo", "group_size", 1, "grpo.group_size: 1 is too small (at least 2)"),
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
        ("grpo", "seed", 2**31, "grpo.seed: is too large (at most 2147483647)"),
        ("grpo", "steps", int("9" * 4000), "grpo.steps: is too large (at most 2147483647)"),
        ("grpo", "delta", 10**400, "grpo.delta: is too large (at most 2147483647)"),
        ("grpo", "learning_rate", "1e999", "grpo.learning_rate: '1e999' is text, not a number"),
        (
            "prompt",
            "instruction",
            "a\ud800",
            r"'prompt.instruction': 'a\ud800' holds half a character (\ud800 to \udfff)",
        ),
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
        ("up\n", {"trainer": "trl"}, "runs: 'up\\n' is no name for a run (letters, digits, '.', '_' and '-')"),
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


@pytest.mark.parametrize("section", ["model", "data"])
@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("local", "..", "'..' does not end in a name of its own, of at most 100 bytes"),
        ("local", "/", "'/' does not end in a name of its own, of at most 100 bytes"),
        ("local", "~", "'~' does not end in a name of its own, of at most 100 bytes"),
        ("local", "/models/{run}", "'/models/{run}' holds a brace or an invisible character; rename it"),
        ("local", "a\0b", r"'a\x00b' holds a brace or an invisible character; rename it"),
        ("hub", "Qwen/..", "'Qwen/..' does not end in a name of its own, of at most 100 bytes"),
        ("hub", "../Qwen", "'../Qwen' is no id such as Qwen/Qwen3-0.6B; for a folder set source: local"),
        ("modelscope", "/srv/qwen", "'/srv/qwen' is no id such as Qwen/Qwen3-0.6B; for a folder set source: local"),
    ],
)
def test_a_name_that_would_leave_the_project_is_refused(config, section, source, name, said):
    config[section] |= {"source": source, "name": name}
    assert faults(config) == [f"{section}.name: {said}"]


def test_a_folder_anywhere_may_be_named(config):
    config["model"] |= {"source": "local", "name": "../我的 模型"}
    assert load(config, "demo")["model"]["name"] == "../我的 模型"


# The file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ": nothing is no list of sections (scale:, model:, data:, ...)"),
        (b"- a\n- b\n", """: ["a", "b"] is no list of sections (scale:, model:, data:, ...)"""),
        (b"a: 1\nb: 2\na: 3\n", ", line 3: a stands here and in line 1; remove one of them"),
        (b"a: {b: 1, b: 2}\n", ", line 1: b stands here and in line 1; remove one of them"),
        (b"a:\n\tb: 1\n", ", line 2: while scanning for the next token, found character '\\t' that cannot start any "
                        "token (indent with spaces)"),
        (b"a: &x\n  b: *x\n", ", line 1: refers to itself"),
        (b"a: *b\n", ", line 1: found undefined alias 'b'"),
        (b"a: 1\n---\nb: 2\n", ", line 2: expected a single document in the stream, but found another document"),
        (b"? [1, 2]\n: 3\n", ", line 1: while constructing a mapping, found unhashable key"),
        (b"a: \xff\n", ": byte 4 is no UTF-8 text; save the file as UTF-8"),
        (b"a: \0\n", ": the character #x0000 may not stand in YAML"),
        (b"a: " + 2000 * b"[", ": is nested too deeply"),
        (b"a: 2020-99-99\n", ": a value cannot be read: month must be in 1..12"),
        (b"a: !!python/object/apply:os.system [exit]\n", ", line 1: could not determine a constructor for the tag "
                                                     "'tag:yaml.org,2002:python/object/apply:os.system'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_named_with_its_line(tmp_path, content, said):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as error:
        read(file)
    assert str(error.value) == f"{file}{said}"


def test_a_file_that_grows_without_end_is_refused_at_once(tmp_path):
    """Nine lines that stand for a billion values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join(10 * [f'*a{i - 1}'])}]" for i in range(1, 9)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(SettingsError, match=r"line 5: refers to itself more than 100,000 times"):
        read(tmp_path / "config.yaml")


def test_anchors_and_merges_are_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\n")
    assert read(tmp_path / "config.yaml") == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(SettingsError, match=r"config\.yaml: cannot be read: No such file .*in the project's folder"):
        read(tmp_path / "config.yaml")


# Whatever stands in it: settings that can be passed on, or a message


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.dates(), st.binary(max_size=9),
    st.text(st.characters(codec=None)), st.just(10**500),
    st.sampled_from(["1e-6", "auto", "full", "demo", "../x", "~"]),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(["full", "demo", "trainer", "steps", "name"]), st.text(), st.integers(), st.none())
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6)
# CI tries the same values each time; FUZZ=5000 pytest -k taken_or_named looks for new ones
EFFORT = {"max_examples": int(os.environ.get("FUZZ", 60)), "derandomize": "FUZZ" not in os.environ, "deadline": None}
PLACES = [(section,) for section in CONFIG] + [(s, k) for s, v in CONFIG.items() if isinstance(v, dict) for k in v]


def check(config) -> None:
    try:
        text = as_text(load(config, "demo"))
    except SettingsError as error:
        assert str(error).strip() and "Traceback" not in str(error)
        str(error).encode()
    else:
        text.encode()


@given(st.sampled_from(PLACES), VALUES)
@example(("scale",), {"full": "full", "demo": "demo"})
@example(("grpo", "reward_weights"), {"full": {}, "demo": {"correct": 10**400}})
@example(("runs",), {"a": {"trainer": "trl", "delta": 10**400, 1: 2}})
@example(("report", "runs"), [[]])
@effort(**EFFORT)
def test_any_value_in_any_place_is_taken_or_named(place, value):
    config = copy.deepcopy(CONFIG)
    section = config
    for key in place[:-1]:
        section = section[key]
    section[place[-1]] = value
    check(config)


@given(VALUES)
@effort(**EFFORT)
def test_a_config_of_anything_is_taken_or_named(value):
    check(value if isinstance(value, dict) else {"grpo": value, value if isinstance(value, str) else "runs": value})


@given(st.data())
@effort(**EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_slip_of_the_hand_in_the_file_is_taken_or_named(tmp_path, data):
    start = data.draw(st.integers(0, len(TEXT) - 1))
    end = data.draw(st.integers(start, min(len(TEXT), start + 80)))
    inserted = data.draw(st.text("\t\n :{}[]&*!|>'\"#-,?e9x\0\ufeff\x85\u2028é", max_size=4))
    file = tmp_path / "config.yaml"
    file.write_text(TEXT[:start] + inserted + TEXT[end:], encoding="utf-8")
    try:
        config = read(file)
    except SettingsError as error:
        assert str(error).startswith(str(file))
    else:
        check(config)


# Through Snakemake


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name in ("workflow", "rules", "scripts", "reports"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_stages_that_need_the_gpu_wait_for_each_other_on_many_cores(project):
    """Each takes the one that the profile has: a resource without a limit would hold nobody back."""
    (project / "config.yaml").write_text(TEXT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--cores", "4", "all", "smoke", "--config", "scale=demo"],
        cwd=project, capture_output=True, text=True,
    )  # fmt: skip
    jobs = re.findall(r"^rule (\w+):\n((?: +.*\n)*)", done.stdout + done.stderr, re.M)
    assert {rule for rule, job in jobs if "gpu=1, gpu_stage=1" in job} == {"model", "train", "evaluate"}
    profile = yaml.safe_load((ROOT / "workflow/profiles/default/profile.yaml").read_text(encoding="utf-8"))
    assert profile["resources"] == {"gpu_stage": 1}


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (lambda text: "", [], "nothing is no list of sections"),
        (lambda text: "- a\n", [], """["a"] is no list of sections"""),
        (lambda text: text + "scale: demo\n", [], "scale stands here and in line 9; remove one of them"),
        (lambda text: text.replace("  steps:", "\tsteps:"), [], "(indent with spaces)"),
        (lambda text: text.replace("trl:", "trl: &a [*a]  #"), [], "refers to itself"),
        (lambda text: text.replace("steps:", "steps: 2020-99-99  #"), [], "month must be in 1..12"),
        (lambda text: text, ["results/trll/report.html"], "config.yaml has no run 'trll'; it has scratch, trl, "),
        (lambda text: text, ["results/../../outside/metrics.csv"], "config.yaml has no run '..'; it has scratch, "),
        (lambda text: text, ["--config", "model={source: local, name: ..}"], "model.name: '..' does not end in a name"),
    ],
)
def test_snakemake_says_it_and_starts_nothing(project, change, arguments, said):
    (project / "config.yaml").write_text(change(TEXT), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", *arguments], cwd=project, capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert said in output
    assert not any(sign in output for sign in ("Traceback", "  File ", "Building DAG", "rule "))
