"""What can happen to a training, really done to it under the real Snakemake: full disks, folders that may not be
written, memory that runs out, clocks that jump, kills. The same command then ends as if nothing had happened.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from test_pipeline import clone
from test_resume import assert_equal_runs, done
from test_trainers import MODULES, manifest, metrics

from scripts.cli import errors_for_people
from scripts.settings import run_settings

STEPS = 20
SMALL = {
    "scale": "demo",
    "grpo": {
        "steps": STEPS, "prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 24, "evaluate_every": 0,
        "max_tokens_per_micro_batch": 9999,
    },
    "engine": {"name": "transformers"},  # it goes on bit for bit
    "checkpoint_every": 1,
}  # fmt: skip
RUNS = MODULES if "KILLS" in os.environ else ["scratch"]  # TRL's take a minute more each
KILLED = "Killed by signal 9. If nobody did that, memory ran out"

pytestmark = pytest.mark.timeout(300)


@contextmanager
def started(
    folder: Path, *arguments: str, under: tuple[str, ...] = (), outlived: bool = False, **env: str
) -> Iterator[SimpleNamespace]:
    """`snakemake --cores 1 ...` in a process group of its own; `said()` is what it has written so far.

    Args:
        under: a command that starts the one given to it.
        outlived: leave alone what outlives Snakemake.
    """
    config, output = folder.parent / "small.yaml", folder.parent / f"said-{time.monotonic_ns()}.txt"
    config.write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    command = [*under, sys.executable, "-m", "snakemake", "--cores", "1", *arguments, "--configfile", str(config)]
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **env}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield SimpleNamespace(process=process, said=lambda: output.read_text(encoding="utf-8", errors="replace"))
    finally:
        if process.poll() is None or not outlived:
            signal_group(process.pid, signal.SIGKILL)
        process.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, number)


def snakemake(folder: Path, *arguments: str, **options) -> tuple[int, str]:
    """Exit code and output."""
    with started(folder, *arguments, **options) as snake:
        return snake.process.wait(), snake.said()


def target(run: str) -> str:
    return f"results/{run}/metrics.csv"


def wait_for(condition: Callable[[], object], snake: SimpleNamespace) -> None:
    while not condition():
        assert snake.process.poll() is None, snake.said()
        time.sleep(0.02)


def members(group: int) -> dict[int, list[str]]:
    """The command lines of a process group, by process id."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.cmdline()
    return found


def trainer_of(group: int) -> int | None:
    """The process id of the trainer in a process group."""
    return next((pid for pid, command in members(group).items() if set(command[1:3]) & set(MODULES.values())), None)


@pytest.fixture(scope="module")
def project(tmp_path_factory, demo_model, demo_data) -> Path:
    """A clone with model and questions in it."""
    folder = clone(tmp_path_factory.mktemp("faults"))
    shutil.copytree(demo_model, folder / "models" / "demo")
    shutil.copytree(demo_data, folder / "data" / "demo")
    return folder


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory) -> Callable[[str], Path]:
    """undisturbed(run): the results of a training that nothing happened to."""
    folder = shutil.copytree(project, tmp_path_factory.mktemp("undisturbed") / "copy")

    def results(run: str) -> Path:
        if not (folder / target(run)).exists():
            code, output = snakemake(folder, target(run))
            assert code == 0, output
        return folder / "results" / run

    return results


@pytest.fixture
def folder(project, tmp_path) -> Path:
    return shutil.copytree(project, tmp_path / "copy")


def mounting() -> list[str]:
    """A command under which mounts are possible and seen by nobody else, or nothing."""
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        trial = [*command, "mount", "-t", "tmpfs", "none", "/tmp"]
        if shutil.which("unshare") and subprocess.run(trial, capture_output=True).returncode == 0:
            return command
    return []


MOUNTING = mounting()
# What needs it is tried a second way, by limits and permissions, where nothing may be mounted.
mounts = pytest.mark.skipif(not MOUNTING, reason="nothing may be mounted here, not even under `unshare -Urm`")


def shell(script: str) -> tuple[str, ...]:
    """A shell in which mounts are possible; "$@" is the command."""
    return (*MOUNTING, "sh", "-c", script, "sh")


@mounts
def test_a_disk_that_is_full_under_the_metrics_and_then_under_the_model_costs_no_step(folder, undisturbed):
    code, output = snakemake(
        folder, target("scratch"), under=shell('mount -t tmpfs -o size=4k none results && "$@"')
    )  # a page: some fifteen rows
    assert code == 1
    file = "'results/scratch/metrics.csv'"
    assert f"No space left on device: {file}; the same command goes on once that is mended" in output
    assert "Traceback" not in output
    last = max(int(path.name.partition("-")[2]) for path in (folder / "checkpoints").glob("*/checkpoint-*"))
    assert 5 < last < STEPS

    code, output = snakemake(
        folder, target("scratch"), under=shell('mount -t tmpfs -o size=600k none results && "$@"')
    )  # a third of the model
    assert code == 1
    assert f"going on from step {last} of {STEPS}" in output
    assert re.search("the model could not be written: .*No space left .*; the same command goes on once", output)
    assert "Traceback" not in output

    code, output = snakemake(folder, target("scratch"))
    assert code == 0, output
    assert f"going on from step {STEPS - 1} of {STEPS}" in output
    assert_equal_runs(folder / "results/scratch", undisturbed("scratch"))


@mounts
@pytest.mark.parametrize("run", RUNS)
def test_a_disk_with_room_for_one_checkpoint_keeps_that_one(run, folder, undisturbed):
    (folder / "checkpoints").mkdir()
    script = """
        mount -t tmpfs -o size=8m none checkpoints && mount -t tmpfs -o size=600k none results && "$@"
        echo "exit code $?"; ls checkpoints/*
        umount results && mount -o remount,size=100m checkpoints && "$@"
    """
    code, output = snakemake(folder, target(run), under=shell(script))
    assert code == 0, output
    first, then = output.split("exit code 1\n")
    # one, or two where the first step had no gradient, so that its checkpoint is small
    kept = [int(step) for step in re.findall(r"checkpoint-(\d+)\n", then[: then.index("Using")])]
    assert kept in ([1], [1, 2])
    assert first.count("no checkpoint this time: ") == STEPS - 1 - len(kept) and "is the disk full?" in first
    assert "the model could not be written" in first
    assert "Traceback" not in output and "terminate called" not in output
    assert f"going on from step {max(kept)} of {STEPS}" in then
    assert_equal_runs(folder / "results" / run, undisturbed(run))


def test_a_limit_on_the_size_of_files_is_said_and_nothing_half_counts(folder):
    """`ulimit -f` needs no rights, so this is tried everywhere; as on a full disk, the system refuses the rest."""
    code, output = snakemake(folder, target("scratch"), under=("sh", "-c", 'ulimit -f 1000 && "$@"', "sh"))
    assert code == 1
    assert output.count("no checkpoint this time: ") == STEPS - 1
    assert re.search("the model could not be written: .*File too large .*; the same command goes on once", output)
    assert "Traceback" not in output
    assert not (folder / target("scratch")).exists() and not list(folder.glob("checkpoints/*/*"))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("results", "read-only"), ("results/scratch", "a file"), ("logs", "read-only"), ("checkpoints", "a file")],
)
def test_a_folder_that_cannot_be_written_is_named_before_anything_starts(folder, name, fault):
    path = folder / name
    shutil.rmtree(path, ignore_errors=True)
    if fault == "read-only":
        path.mkdir(parents=True, mode=0o555)
    else:
        path.touch()
    # permissions bind root as well once it has given up its power to pass over them
    bound = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    code, output = snakemake(folder, target("scratch"), under=bound)
    assert code == 1
    assert f"\n{name} cannot be written: {path} is no folder, is read-only or is somebody else's. Mend that" in output
    assert "Traceback" not in output and "rule train" not in output


@mounts
def test_results_on_a_read_only_disk_are_named_before_anything_starts(folder):
    """It binds root as well, and a dry run has nothing to write there."""
    read_only = shell('mount --bind results results && mount -o remount,ro,bind results && "$@"')
    code, output = snakemake(folder, target("scratch"), under=read_only)
    assert code == 1
    assert "\nresults cannot be written: " in output and "Traceback" not in output
    code, output = snakemake(folder, target("scratch"), "-n", under=read_only)
    assert code == 0, output


@mounts
def test_a_log_that_cannot_be_written_costs_nothing_but_the_log(folder, undisturbed):
    (folder / "logs").mkdir()
    script = """
        mount -t tmpfs -o size=4k none logs && head -c 4096 /dev/zero >logs/other
        mkdir logs/benchmarks && mount -t tmpfs none logs/benchmarks && "$@"
    """
    code, output = snakemake(folder, target("scratch"), under=shell(script))
    assert code == 0, output
    assert "logs/train_scratch.log: No space left on device" in output
    assert f"step   {STEPS}  reward" in output
    assert_equal_runs(folder / "results/scratch", undisturbed("scratch"))


def killed_by_hand(snake: SimpleNamespace) -> None:
    os.kill(trainer_of(snake.process.pid), signal.SIGKILL)


def killed_by_the_kernel(snake: SimpleNamespace) -> None:
    """In a cgroup with the trainer, another process takes all the memory that it may have."""
    pid = trainer_of(snake.process.pid)
    with memory_group() as group:
        (group / "cgroup.procs").write_text(str(pid))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")  # of the two, the trainer
        enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"
        hog = subprocess.Popen([sys.executable, "-c", f"{enter}; b = b'x' * 2**29; input()"], stdin=subprocess.PIPE)
        try:
            wait_for(lambda: trainer_of(snake.process.pid) != pid, snake)
        finally:
            hog.kill()
            hog.wait()


@contextmanager
def memory_group() -> Iterator[Path]:
    """A cgroup that may hold 400 MiB more than its first process has already."""
    group, root = Path(), Path("/sys/fs/cgroup")
    versions = [
        (root / "memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        (root, "memory.max", "memory.swap.max"),
    ]
    for parent, limit, swap in versions:
        with suppress(OSError):
            group = parent / f"duet-{os.getpid()}"
            group.mkdir()
            try:
                (group / limit).write_text(str(400 * 2**20))
            except OSError:
                group.rmdir()
                raise
            with suppress(OSError):  # no way out into swap, where there is any
                (group / swap).write_text(str(400 * 2**20) if "memsw" in swap else "0")
            break
    else:
        pytest.skip("no cgroup that limits memory may be made here")
    try:
        yield group
    finally:
        for _ in range(100):  # the dead may still be on their way out
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@pytest.mark.parametrize("kill", [killed_by_hand, killed_by_the_kernel])
def test_a_killed_training_says_that_memory_ran_out_and_keeps_its_checkpoints(folder, kill):
    with started(folder, target("scratch")) as snake:
        wait_for(lambda: done(folder / target("scratch")) > 2, snake)
        kill(snake)
        assert snake.process.wait() == 1
        assert KILLED in snake.said() and "lower grpo.max_tokens_per_micro_batch" in snake.said()
    assert KILLED in (folder / "logs/train_scratch.log").read_text(encoding="utf-8")
    assert list(folder.glob("checkpoints/*/checkpoint-*")), "the same command goes on from there, as below"


@pytest.mark.parametrize("allocate", [lambda: bytearray(2**60), lambda: torch.empty(2**50)])
def test_memory_that_the_system_refuses_is_said(allocate):
    """As under `ulimit -v`; where memory is granted and then is not there, the kernel kills instead, as above."""
    with pytest.raises(SystemExit, match=r"There is not enough memory, or a limit .* lower grpo.max_tokens_per_micro"):
        with errors_for_people():
            allocate()


def test_a_clock_that_is_set_while_a_run_goes_on_leaves_no_trace(folder, undisturbed, tmp_path):
    """By up to a day, forth and back, whenever the training asks for the time; and a kill between."""
    (tmp_path / "sitecustomize.py").write_text(
        "import random, sys, time\n"
        f"if {MODULES['scratch']!r} in sys.orig_argv:\n"
        "    true = time.time\n"
        "    time.time = lambda: true() + random.uniform(-86400, 86400)\n"
    )
    with started(folder, target("scratch"), PYTHONPATH=str(tmp_path)) as snake:
        wait_for(lambda: done(folder / target("scratch")) > 2, snake)
        killed_by_hand(snake)
        snake.process.wait()
    code, output = snakemake(folder, target("scratch"), PYTHONPATH=str(tmp_path))
    assert code == 0, output
    assert re.search(rf"going on from step \d+ of {STEPS}", output)
    results = folder / "results/scratch"
    rows = metrics(results)
    assert rows["seconds"].is_monotonic_increasing and rows["seconds"].iloc[0] > 0 and rows["seconds"].iloc[-1] < 120
    assert rows.filter(like="seconds").min().min() >= 0
    assert rows["seconds"].iloc[-1] <= manifest(results)["seconds"] < 120
    assert_equal_runs(results, undisturbed("scratch"))


def test_a_clock_that_was_set_back_makes_no_result_too_old(folder, undisturbed):
    """Snakemake drops what is older than what it was made from; here by five hours, before a training and during it."""
    made = [*folder.glob("models/demo/*"), *folder.glob("data/demo/*")]

    def set_back() -> None:
        for path in made:
            os.utime(path, (time.time() + 5 * 3600,) * 2)

    set_back()
    with started(folder, target("scratch")) as snake:
        wait_for(lambda: done(folder / target("scratch")) > 1, snake)
        assert max(path.stat().st_mtime for path in made) < time.time()
        set_back()
        assert snake.process.wait() == 0, snake.said()
    code, output = snakemake(folder, target("scratch"), "-n")
    assert code == 0 and "Nothing to be done" in output
    assert_equal_runs(folder / "results/scratch", undisturbed("scratch"))


def test_a_second_snakemake_says_that_the_first_is_at_work_and_one_that_unlocks_takes_over(folder, undisturbed):
    with started(folder, target("scratch")) as first:
        wait_for(lambda: done(folder / target("scratch")) > 1, first)
        trainer = trainer_of(first.process.pid)
        os.kill(trainer, signal.SIGSTOP)  # else it might be done before the others have begun
        code, output = snakemake(folder, target("scratch"))
        assert code == 1
        assert "Directory cannot be locked" in output and "no other Snakemake process" in output
        assert "removed with the --unlock argument" in output and "Traceback" not in output
        assert first.process.poll() is None

        assert snakemake(folder, "--unlock")[0] == 0
        with started(folder, target("scratch")) as second:
            wait_for(lambda: not (folder / target("scratch")).exists(), second)
            # Halted, so that what the first one clears up as it fails is not the second one's.
            signal_group(second.process.pid, signal.SIGSTOP)
            os.kill(trainer, signal.SIGCONT)
            assert first.process.wait() == 1
            signal_group(second.process.pid, signal.SIGCONT)
            assert second.process.wait() == 0, second.said()
            assert re.search(rf"going on from step \d+ of {STEPS}", second.said())
        assert f"{target('scratch')} was removed: this run was begun again" in first.said()
    assert_equal_runs(folder / "results/scratch", undisturbed("scratch"))


def test_after_kill_9_of_snakemake_its_training_stops_too_and_unlock_is_enough(folder, undisturbed):
    with started(folder, target("scratch"), outlived=True) as snake:
        wait_for(lambda: done(folder / target("scratch")) > 1, snake)
        snake.process.kill()
        snake.process.wait()
        while members(snake.process.pid):  # the trainer, and what writes down what it says
            time.sleep(0.1)
        last = re.search(r"stopped after step (\d+); the same command goes on from its last checkpoint", snake.said())
        assert "the Snakemake that started this run is gone" in snake.said() and "Traceback" not in snake.said()
    assert "Directory cannot be locked" in snakemake(folder, target("scratch"))[1]
    assert snakemake(folder, "--unlock")[0] == 0
    code, output = snakemake(folder, target("scratch"))
    assert code == 0, output
    assert f"going on from step {last[1]} of {STEPS}" in output
    assert_equal_runs(folder / "results/scratch", undisturbed("scratch"))


KILLS = int(os.environ.get("KILLS", "2"))


@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("run", RUNS)
def test_killed_again_and_again_under_snakemake_it_ends_as_if_nothing_had_happened(run, folder, undisturbed):
    """Snakemake alone, its trainer alone, or all at once as Ctrl-C in a terminal does; KILLS=30 for thirty.

    After each the same command, where Snakemake asks for it after `snakemake --unlock`. A run that finishes on the way
    is compared and begun again.
    """
    rng, rows = random.Random(run), folder / target(run)
    kills = locks = finished = lost = reached = 0
    for _ in range(4 * KILLS + 4):
        now = 0
        with started(folder, target(run), outlived=True) as snake:
            if kills < KILLS:
                wait_for_a_moment(rng, rows, snake)
                number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
                whom = rng.choice(["snakemake", "trainer", "all"])
                if snake.process.poll() is None:
                    kills, now = kills + 1, done(rows)
                    print(f"{number.name} to {whom} at step {now}")
                    if whom == "all":
                        signal_group(snake.process.pid, number)
                    else:
                        trainer = trainer_of(snake.process.pid) if whom == "trainer" else None
                        os.kill(trainer or snake.process.pid, number)
            code = snake.process.wait()
        if "Directory cannot be locked" in snake.said():
            assert snakemake(folder, "--unlock")[0] == 0
            locks += 1
        elif resumed := re.search(rf"going on from step (\d+) of {STEPS}", snake.said()):
            print(f"{resumed[0]}; {reached} had been reached")
            lost += max(0, reached - int(resumed[1]))
            reached = 0
        reached = max(reached, now)
        if code == 0:
            assert metrics(rows.parent)["step"].tolist() == list(range(1, STEPS + 1))
            assert_equal_runs(rows.parent, undisturbed(run))
            finished += 1
            reached = 0
            if kills == KILLS:
                break
            shutil.rmtree(rows.parent)
    else:
        pytest.fail(snake.said())
    print(f"{run}: {kills} kills, {locks} locks, {lost} finished steps lost, {finished} runs finished, all the same")


def wait_for_a_moment(rng: random.Random, rows: Path, snake: SimpleNamespace) -> None:
    """Mostly some time after a new row, else while the training starts."""
    if rng.random() < 0.7:
        before = done(rows)
        while done(rows) in (0, before) and snake.process.poll() is None:
            time.sleep(0.02)
    else:
        time.sleep(5 * rng.random())
    time.sleep(rng.random())


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed here")
def test_a_vllm_told_to_run_in_another_process_ends_the_run_with_the_way_out(project, demo_settings):
    """No weights could be pushed into it; without the check the first push would fail, after all was loaded."""
    settings = {
        **run_settings(demo_settings, "scratch"),
        "engine": {"name": "vllm", "memory_gib": 1.0, "sleep": "auto"},
    }
    arguments = ["--run", "scratch", "--model", "models/demo", "--data", "data/demo", "--out", "results/scratch"]
    done = subprocess.run(
        [sys.executable, "-m", MODULES["scratch"], *arguments, "--settings", json.dumps(settings)],
        cwd=project, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Unset VLLM_ENABLE_V1_MULTIPROCESSING, or set it to 0, and start again." in done.stderr
    assert "Traceback" not in done.stderr and not (project / "results" / "scratch").exists()
