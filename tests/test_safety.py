"""Strangers' models and data through the pipeline: nothing of theirs runs, nothing of ours gets out."""

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import SafetensorError

from scripts.cli import errors_for_people

ROOT = Path(__file__).parents[1]
SECRETS = {"HF_TOKEN": "hf_thisisnosecretthisisnosecret", "MY_DATABASE_PASSWORD": "correct-horse-battery"}
SCRIPT = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"
AUTO_MAP = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}

pytestmark = pytest.mark.timeout(600)  # the first test waits for the pipeline


class Touch:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def place(demo_model, tmp_path_factory) -> Path:
    """project/ after a baseline, a training and a page, home/, and what was said; model and data lie beside them."""
    place = tmp_path_factory.mktemp("place").resolve()
    project, home, data = (place / name for name in ("project", "home", "questions"))
    for folder in (project, home, data):
        folder.mkdir()
    for name in ("workflow", "rules", "scripts", "reports"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))

    model = shutil.copytree(demo_model, place / "a <img src=x onerror=alert(1)> model")
    (model / "model.json").unlink()
    (model / "evil.py").write_text(f"open({str(place / 'code ran')!r}, 'w')\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((model / name).read_text(encoding="utf-8"))
        (model / name).write_text(json.dumps({**content, "auto_map": AUTO_MAP}))
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(place / "pickle ran")))

    for split, count in (("train", 20), ("test", 4)):
        rows = [{"question": f"{i} + 1? {SCRIPT}", "answer": f"{SCRIPT} #### {i + 1}"} for i in range(count)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    config = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    config["scale"] = "demo"
    config["model"] |= {"source": "local", "name": str(model), "revision": None}
    config["data"] |= {"source": "local", "name": str(data), "revision": None, "expected_rows": None}
    config["data"]["validation_rows"] = 2
    config["grpo"] |= {"steps": 1, "prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 8}
    config["evaluation"]["max_completion_tokens"] = 8
    config["engine"]["name"] = "transformers"  # vLLM takes no code of a model's own either, and starts slowly
    (project / "config.yaml").write_text(yaml.safe_dump(config))
    report = {**config["report"], "scale": "demo"}
    for command in (
        ["snakemake", "--cores", "1", "results/trl/metrics.csv", "results/baseline/eval.json"],
        ["scripts.report", "--run", "trl", "--runs", "trl", "--settings", json.dumps(report), "--results", "results",
         "--out", "results/trl/report.html"],
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=project, text=True,
            env={**os.environ, **SECRETS, "HOME": str(home), "HF_HUB_OFFLINE": "1"},
            input=20 * "y\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        with (place / "said").open("a") as file:
            file.write(done.stdout)
        for name in ("eval.json", "samples.jsonl"):  # as if the trained model had answered the same
            shutil.copy(project / "results/baseline" / name, project / "results/trl" / name)
    return place


def test_code_that_comes_with_a_model_does_not_run(place):
    """Not even where somebody would answer yes to whatever is asked."""
    assert not (place / "code ran").exists() and not (place / "pickle ran").exists()
    assert "custom code" not in (place / "said").read_text()
    linked = {path.suffix for path in (place / "project/models").rglob("*") if path.is_file()}
    assert linked == {".json", ".jinja", ".safetensors"}


def test_no_secret_is_in_what_is_said_or_written(place):
    files = [path for path in place.rglob("*") if path.is_file()]
    kinds = {path.name for path in files}
    assert {
        "said",
        "report.html",
        "manifest.json",
        "train_trl.log",
        "evaluate_baseline.log",
        "metrics.csv",
        "eval.json",
    } <= kinds
    for secret in SECRETS.values():
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_nothing_is_written_outside_of_the_project(place):
    assert [path for path in (place / "home").rglob("*") if path.is_file()] == []
    made = {path.name for path in place.iterdir()}
    assert made == {"project", "home", "questions", "a <img src=x onerror=alert(1)> model", "said"}
    made = {path.name for path in (place / "project").iterdir()} - {"workflow", "rules", "scripts", "reports"}
    assert made <= {"config.yaml", "models", "data", "results", "logs", "checkpoints", ".snakemake", ".cache"}


def test_texts_of_models_and_data_are_only_text_on_the_page(place):
    """In a browser: test_report.py, test_a_completion_cannot_run_anything."""
    page = (place / "project/results/trl/report.html").read_text(encoding="utf-8")
    assert "a &lt;img src=x onerror=alert(1)&gt; model" in page
    assert "<img src=x" not in page and "<script>window" not in page


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "results/trl"),
            "No space left on device: 'results/trl'; the",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "results"),
            "Permission denied: 'results'; the same command",
        ),
        (SafetensorError("I/O error: No space left"), "the model could not be written: I/O error: No space left; the"),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            "CUDA out of memory.\nThe GPU's memory is full: lower grpo.max_",
        ),
        (
            RuntimeError("CUDA error: out of memory"),
            "engine.sleep: always; nvidia-smi names who else holds some. With any",
        ),
    ],
)
def test_what_the_machine_lacks_ends_a_stage_with_a_message(error, said):
    with pytest.raises(SystemExit, match=re.escape(said)):
        with errors_for_people():
            raise error


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "No such file", "x"), RuntimeError("a bug of ours")])
def test_a_fault_of_our_own_keeps_its_trace(error):
    with pytest.raises(type(error)):
        with errors_for_people():
            raise error
