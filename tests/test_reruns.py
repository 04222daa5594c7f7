"""What runs again after which change: the README's table, row by row, on a finished copy, with the real Snakemake."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = ["config.yaml", "workflow", "rules", "scripts", "reports"]
PREPARED = [
    "models/demo/model.json",
    *(f"data/demo/{n}" for n in ("train.jsonl", "validation.jsonl", "test.jsonl", "data.json")),
]
EVALUATED = ["eval.json", "samples.jsonl"]
TRAINED = ["metrics.csv", "manifest.json", "model/model.json", "report.html"]

BOTH = ["train scratch", "train trl", "evaluate scratch", "evaluate trl"]
PAGES = ["page scratch", "page trl"]
BASELINE = ["evaluate baseline"]


def snakemake(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments, "--config", "scale=demo"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def planned(folder: Path, *targets: str) -> list[str]:
    """Jobs of a dry run, as `rule run`, sorted; `all` is left out."""
    blocks = re.split(r"\n(?=rule )", snakemake(folder, *targets, "-n"))[1:]
    jobs = []
    for block in blocks:
        rule = re.match(r"rule (\w+):", block)[1]
        run = re.search(r"wildcards: run=(\S+)", block)
        jobs.append(f"{rule} {run[1]}" if run else rule)
    return sorted(set(jobs) - {"all"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A copy of the project in which everything has been made, as Snakemake sees it."""
    folder = tmp_path_factory.mktemp("finished") / "duet"
    for name in PROJECT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy2(source, folder / name)
    results = [f"results/{run}/{name}" for run in ("scratch", "trl") for name in TRAINED + EVALUATED]
    for name in [*PREPARED, *results, *(f"results/baseline/{name}" for name in EVALUATED)]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    snakemake(folder, "--touch", "--forceall", "all")
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "duet", symlinks=True)


def replace(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")

    return change


def edit(module: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / module).open("a", encoding="utf-8") as file:
            file.write("\nADDED = 1\n")

    return change


def touch_everything(folder: Path) -> None:
    for path in [
        *folder.glob("scripts/**/*.py"),
        *folder.glob("data/**/*"),
        *folder.glob("models/**/*"),
        folder / "config.yaml",
    ]:
        if path.is_file():
            path.touch()


def reorder_grpo(folder: Path) -> None:
    replace("config.yaml", "  top_k: 0  ", "  # top_k stood here\n  ignored: 0  ")(folder)
    replace("config.yaml", "  ignored: 0", "  top_k: 0")(folder)
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("  top_k"))
    text = text.replace(line + "\n", "").replace("grpo:\n", f"grpo:\n{line}\n", 1)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


CHANGES = {
    "nothing": (lambda folder: None, []),
    "a comment in config.yaml": (replace("config.yaml", "# Every setting", "# Each and every setting"), []),
    "the order of settings": (reorder_grpo, []),
    "1.0 written as 1": (replace("config.yaml", "max_grad_norm: 1.0", "max_grad_norm: 1"), []),
    "a touch of every file": (touch_everything, []),
    "tracking": (replace("config.yaml", "tracking: none", "tracking: tensorboard"), []),
    "a new run": (
        replace(
            "config.yaml", "  trl: {trainer: trl}", "  trl: {trainer: trl}\n  hot: {trainer: scratch, epsilon: 0.1}"
        ),
        [],
    ),
    "the other scale's value": (replace("config.yaml", "steps: {full: 200,", "steps: {full: 100,"), []),
    "a report setting": (replace("config.yaml", "smoothing: 10", "smoothing: 5"), PAGES),
    "an override of the scratch run": (
        replace("config.yaml", "scratch: {trainer: scratch}", "scratch: {trainer: scratch, learning_rate: 3.0e-4}"),
        ["train scratch", "evaluate scratch", *PAGES],
    ),
    "a shared grpo setting": (replace("config.yaml", "  epsilon: 0.2\n", "  epsilon: 0.1\n"), [*BOTH, *PAGES]),
    "an evaluation setting": (
        replace(
            "config.yaml",
            "max_completion_tokens: {full: 512, demo: 40}  # of an answer",
            "max_completion_tokens: 41  # of an answer",
        ),
        ["evaluate scratch", "evaluate trl", *BASELINE, *PAGES],
    ),
    "an engine setting": (
        replace("config.yaml", "memory_gib: {full: 6.0, demo: 1.0}", "memory_gib: 2.0"),
        [*BOTH, *BASELINE, *PAGES],
    ),
    "whether the engine sleeps": (replace("config.yaml", "  sleep: auto", "  sleep: never"), [*BOTH, *PAGES]),
    "a data setting": (replace("config.yaml", "test_rows: 200", "test_rows: 100"), ["data", *BOTH, *BASELINE, *PAGES]),
    "a model setting": (
        replace("config.yaml", "careless_share: 0.65", "careless_share: 0.5"),
        ["model", *BOTH, *BASELINE, *PAGES],
    ),
    "the prompt": (
        replace("config.yaml", 'demo: ""', 'demo: "Answer after ####."'),
        ["model", *BOTH, *BASELINE, *PAGES],
    ),
    "grpo.py": (edit("scripts/grpo_scratch/grpo.py"), ["train scratch", "evaluate scratch", *PAGES]),
    "TRL's train.py": (edit("scripts/trl_grpo/train.py"), ["train trl", "evaluate trl", *PAGES]),
    "the engine, rollout.py": (
        edit("scripts/grpo_scratch/rollout.py"),
        [*BOTH, *BASELINE, *PAGES],
    ),
    "what is right, rewards.py": (edit("scripts/grpo_scratch/rewards.py"), ["data", *BOTH, *BASELINE, *PAGES]),
    "metrics.csv, edited by hand": (edit("results/scratch/metrics.csv"), PAGES),
    "the page's template": (edit("reports/template.html.j2"), PAGES),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_depends_on_a_change_runs_again(copy, change):
    make_change, expected = CHANGES[change]
    make_change(copy)
    assert planned(copy) == sorted(expected)


def test_a_new_run_is_trained_when_its_page_is_asked_for(copy):
    CHANGES["a new run"][0](copy)
    assert planned(copy, "results/hot/report.html") == ["evaluate hot", "page hot", "train hot"]


def test_the_way_back_from_an_edited_metrics_csv_is_as_the_page_says_it(copy):
    """Left where it is, the page is newer than all that it is made of, and Snakemake would do nothing."""
    for file in ("scratch/metrics.csv", "trl/report.html"):
        (copy / "results" / file).unlink()
    assert planned(copy, "results/trl/report.html") == ["evaluate scratch", "page trl", "train scratch"]


def test_smoke_trains_ten_steps_of_each_trainer_and_leaves_the_runs_alone(copy):
    assert planned(copy, "smoke") == ["smoke", "train smoke-scratch", "train smoke-trl"]


def test_a_folder_of_the_users_own_is_never_overwritten(copy):
    (copy / "mine.yaml").write_text("data: {source: local, name: data/demo}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--configfile", "mine.yaml"], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"{copy}/data/demo overlaps with {copy}/data" in done.stdout + done.stderr


def test_the_default_profile_names_the_cores(copy):
    """Plain `snakemake FILE` works without --cores."""
    assert "Nothing to be done" in snakemake(copy, "results/trl/report.html")
