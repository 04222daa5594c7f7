"""Checkpoints of a training run: whole or not at all, and only ever resumed by the run that wrote them.

They lie in checkpoints/<run>-<digest>/checkpoint-<step>/, outside of what Snakemake deletes when a stage fails. The
digest is of everything that the run's mathematics depend on: settings, code, model and data. A run that has finished
removes them.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from scripts import ranks
from scripts.cli import RunStopped
from scripts.prepared import sha256_of
from scripts.settings import as_text
from scripts.sources import digest, imported_sources

SEAL = "whole.json"  # size and SHA-256 of each file; written last
KEPT = 2


def without_memory_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """A run's settings without those that only say how much memory it may take: they may change on the way.

    So a run that ran out of memory goes on with less, where it was. (TRL's bnpo averages over each micro-batch.)
    """
    if settings["grpo"]["loss_type"] == "bnpo":
        return settings
    grpo = {
        k: v for k, v in settings["grpo"].items() if k not in ("max_tokens_per_micro_batch", "gradient_checkpointing")
    }
    return {**settings, "grpo": grpo, "engine": {"name": settings["engine"]["name"]}}


class Checkpoints:
    """The checkpoints of one run, and the lock that keeps a second process off it.

    Args:
        module: the trainer's, for the code that it imports.
        every: steps between checkpoints; 0: only when the run is asked to stop.
    """

    def __init__(self, settings: dict[str, Any], module: str, model_dir: Path, data_dir: Path, every: int):
        records = [(model_dir / "model.json").read_text("utf-8"), (data_dir / "data.json").read_text("utf-8")]
        identity = "\n".join([as_text(without_memory_settings(settings)), digest(imported_sources(module)), *records])
        self.folder = Path("checkpoints") / f"{settings['run']}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self._every = every
        self._steps = settings["grpo"]["steps"]
        if ranks.first():
            self._lock = _locked(Path("checkpoints") / f"{settings['run']}.lock")
        self._stop = StopRequest()
        self.stopping = False  # all processes agree on it, at the end of a step

    def newest(self) -> Path | None:
        """The newest whole checkpoint; what is torn or unfinished is named and removed."""
        return ranks.gather([self._newest() if ranks.first() else None])[0]

    def _newest(self) -> Path | None:
        for folder in sorted(self.folder.glob("checkpoint-*"), key=step_of, reverse=True):
            fault = _fault(folder)
            if fault is None:
                print(f"going on from step {step_of(folder)} of {self._steps}: {folder}", flush=True)
                return folder
            print(f"{folder} is not whole ({fault}); left out", flush=True)
            shutil.rmtree(folder)
        return None

    def due(self, step: int) -> bool:
        """Whether to save after this step: every so many, and when the run is asked to stop; never after the last."""
        asked = self._stop.requested or (ranks.first() and _orphaned())
        self.stopping = step < self._steps and any(ranks.gather([asked]))
        return self.stopping or (step < self._steps and self._every > 0 and step % self._every == 0)

    def save(self, step: int, state: dict[str, Any], metrics: Path) -> None:
        """Write a checkpoint. Where that fails, the run goes on without it, and the one before stays."""
        if not ranks.first():
            return  # weights and optimizer are the same everywhere
        unfinished, whole = self.folder / "unfinished", self.folder / f"checkpoint-{step}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
            torch.save(state, unfinished / "state.pt")
            seal(unfinished, metrics)
            os.replace(unfinished, whole)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            say_unsaved(unfinished, error)
            return
        for old in sorted(self.folder.glob("checkpoint-*"), key=step_of)[:-KEPT]:
            shutil.rmtree(old)

    def stop_here(self, step: int) -> None:
        """End the run where it was asked to.

        Raises:
            RunStopped: with what happens next.
        """
        if self.stopping:
            self._close()
            raise RunStopped(f"stopped after step {step}; the same command goes on from its last checkpoint")

    def remove(self) -> None:
        """The run is finished: its checkpoints have served."""
        if ranks.first():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        self._stop.close()
        if ranks.first():
            self._lock.release()


class StopRequest:
    """Ctrl-C or SIGTERM lets the step in hand end; a second one ends the process at once, if it is the only one."""

    def __init__(self) -> None:
        self.requested = False
        self._before = {number: signal.signal(number, self._asked) for number in (signal.SIGINT, signal.SIGTERM)}

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: Any) -> None:
        several = ranks.count() > 1  # torchrun sends on what each process may have got from SLURM as well
        if self.requested and not several:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if ranks.first() and not self.requested:
            again = "" if several else " (again: at once)"
            print(f"stopping after this step{again}", file=sys.stderr, flush=True)
        self.requested = True


def _orphaned() -> bool:
    """Whether the Snakemake that started this was killed, so that nobody would take the results."""
    try:
        os.kill(int(os.environ.get("SNAKEMAKE_PID", os.getpid())), 0)
    except (ProcessLookupError, PermissionError):  # no such process, or by now somebody else's
        print("the Snakemake that started this run is gone; stopping after this step", file=sys.stderr, flush=True)
        return True
    return False


def seal(folder: Path, metrics: Path) -> None:
    """Make a checkpoint whole: the metrics so far, and a record of every file; all of it really on the disk."""
    shutil.copyfile(metrics, folder / "metrics.csv")
    files = {path.name: path for path in folder.iterdir() if path.is_file() and path.name != SEAL}
    for path in files.values():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    record = {name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for name, path in sorted(files.items())}
    with (folder / SEAL).open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def say_unsaved(folder: Path, error: Exception) -> None:
    """A checkpoint could not be written: clear what there is of it, and say so."""
    shutil.rmtree(folder, ignore_errors=True)
    print(f"no checkpoint this time: {error}. The run goes on with the one before; is the disk full?", flush=True)


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words."""
    try:
        record = json.loads((folder / SEAL).read_text("utf-8"))
    except (OSError, ValueError):
        return "it was not finished"
    for name, recorded in record.items():
        path = folder / name
        if not path.exists() or path.stat().st_size != recorded["bytes"] or sha256_of(path) != recorded["sha256"]:
            return f"{name} is damaged"
    return None


def _locked(path: Path) -> FileLock:
    """Hold `path` until this process ends, however it ends; wait where another one holds it."""
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process trains this run ({path} is locked); waiting for it to end", flush=True)
        lock.acquire()
    return lock
