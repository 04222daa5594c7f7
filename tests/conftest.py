"""A demo model and questions that the project's own stages made, small enough to be made anew for every test run."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

# Idle OpenMP threads that spin make everything many times slower on a shared machine; read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from scripts import settings as project_settings

ROOT = Path(__file__).parents[1]


def run_module(module: str, *arguments: Any, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """`python -m module ...`, as the rules start it; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def demo_settings() -> dict[str, Any]:
    """config.yaml at demo scale, with little of everything. Do not change it: take `settings`."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    config["model"]["warm_start_steps"] = 60
    config["data"] |= {"train_rows": 60, "validation_rows": 10, "test_rows": 20}
    config["grpo"] |= {
        "steps": 3, "prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 24, "evaluate_every": 2,
        "max_tokens_per_micro_batch": 600,
    }  # fmt: skip
    config["evaluation"]["max_completion_tokens"] = 24
    return project_settings.load(config, "demo")


@pytest.fixture
def settings(demo_settings) -> dict[str, Any]:
    return copy.deepcopy(demo_settings)


@pytest.fixture(scope="session")
def demo_model(demo_settings, tmp_path_factory) -> Path:
    """A model folder, built and barely warm-started by the stage that builds the demo's."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    section = {**demo_settings["model"], "instruction": demo_settings["prompt"]["instruction"]}
    run_module("scripts.prepare.demo_model", "--settings", json.dumps(section), "--out", folder)
    return folder


@pytest.fixture(scope="session")
def demo_data(demo_settings, tmp_path_factory) -> Path:
    """A folder of questions, made by the stage that makes the demo's."""
    folder = tmp_path_factory.mktemp("data") / "demo"
    run_module("scripts.prepare.data", "--settings", json.dumps(demo_settings["data"]), "--out", folder)
    return folder
