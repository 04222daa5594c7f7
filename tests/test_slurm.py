"""The pipeline under a real SLURM: one node on this machine, started for these tests, whose one GPU is /dev/null."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from test_pipeline import ROOT, RUNS, SMALL, clone, metrics_rows, snakemake, started

STEPS = 20  # enough to cancel a training half way
# vLLM takes long to start, and is the same in a job.
CONFIG = {**SMALL, "grpo": {**SMALL["grpo"], "steps": STEPS}, "engine": {"name": "transformers"}}
COMMAND = [
    "--profile", "workflow/profiles/slurm", "all", "--config", "scale=demo",
    "--slurm-init-seconds-before-status-checks", "1",  # the profile's looks at its jobs suit trainings of hours
]  # fmt: skip
DAEMONS = ["munged", "slurmctld", "slurmd"]
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
MISSING = [name for name in DAEMONS if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here; on Debian: apt install slurm-wlm munge"),
    pytest.mark.timeout(900),  # the first test waits for the whole pipeline
]

# The node says that it has what the profile asks for, whatever this machine has.
SLURM_CONF = """\
ClusterName=duet
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=3600
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=100000 Gres=gpu:1
PartitionName=main Nodes={host} Default=YES
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def comes_true(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def wait_until(condition, seconds: float, what: str) -> None:
    assert comes_true(condition, seconds), f"waited {seconds} s for {what}"


class Cluster:
    """What a user of the cluster sees of it."""

    def __init__(self, folder: Path):
        self.env = {"PATH": f"{folder}{os.pathsep}{PATH}", "SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, text=True).stdout

    def jobs(self) -> list[dict[str, str]]:
        """All jobs ever, oldest first, as `scontrol show jobs` describes them."""
        lines = self.ask("scontrol", "--oneliner", "show", "jobs").splitlines()
        jobs = [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in lines]
        return sorted((job for job in jobs if "JobId" in job), key=lambda job: int(job["JobId"]))

    def trainings(self, state: str) -> list[dict[str, str]]:
        return [job for job in self.jobs() if job["Comment"].startswith("rule_train") and job["JobState"] == state]

    def idle(self) -> bool:
        return not self.ask("squeue", "--noheader").strip()


@contextmanager
def running_slurm(folder: Path) -> Iterator[Cluster]:
    """munged, slurmctld and slurmd with everything of theirs in `folder`; at the end all are stopped, jobs first."""
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    conf = SLURM_CONF.format(folder=folder, host=host, ports=free_ports(2), user=getpass.getuser())
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    # The plugin starts a stage by an `srun` without SLURM_CONF; clusters have theirs where srun looks of itself.
    srun = folder / "srun"
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun")} "$@"\n')
    srun.chmod(0o755)
    cluster = Cluster(folder)
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    commands = {
        "munged": ["--foreground", "--force", *(f"--{option}={folder}/munge.{end}" for option, end in munge.items())],
        "slurmctld": ["-D"],
        "slurmd": ["-D"],
    }
    processes: list[subprocess.Popen] = []
    try:
        for name, options in commands.items():
            command = [shutil.which(name, path=PATH), *options]
            with (folder / f"{name}.out").open("w") as log:
                process = subprocess.Popen(command, env={**os.environ, **cluster.env}, stdout=log, stderr=log)
            processes.append(process)
            if name == "munged" and not comes_true((folder / "munge.socket").exists, 10):
                pytest.skip("munged does not start on this machine, which is no fault of the pipeline's")
        if not comes_true(lambda: "idle" in cluster.ask("sinfo", "--noheader", "--format", "%T"), 30):
            said = "".join((folder / f"{name}.out").read_text()[-500:] for name in commands)
            pytest.skip(f"SLURM does not start on this machine, which is no fault of the pipeline's: {said}")
        yield cluster
    finally:
        # A step that outlives its slurmd would be nobody's.
        cluster.ask("scancel", "--user", getpass.getuser())
        try:
            wait_until(cluster.idle, 60, "the jobs to end")
        finally:
            for process in reversed(processes):
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def gpus(job: dict[str, str]) -> str:
    """What the job asked for: gpu:1, or nothing."""
    return job.get("TresPerJob", "").removeprefix("gres").lstrip(":/").replace("=", ":")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Cluster]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def story(slurm, tmp_path_factory) -> dict:
    """A clone's first run, in which a training was cancelled after its third step, and the same command once more."""
    folder = clone(tmp_path_factory.mktemp("story"))
    told = {"folder": folder}
    with started(folder, *COMMAND, config=CONFIG, **slurm.env) as process:
        while not (running := slurm.trainings("RUNNING")):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
        (job,) = running
        run = told["run"] = job["Comment"].rsplit("_", 1)[1]
        while metrics_rows(folder, run) < 3:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        told["meanwhile"] = slurm.jobs()
        slurm.ask("scancel", job["JobId"])
        output, _ = process.communicate()
        told["first"] = process.returncode, output
    told["second"] = snakemake(folder, *COMMAND, config=CONFIG, **slurm.env)
    told["third"] = snakemake(folder, *COMMAND, config=CONFIG, **slurm.env)
    told["jobs"] = slurm.jobs()
    return told


def test_a_cancelled_job_fails_with_its_log_named(story):
    code, output = story["first"]
    assert code == 1
    assert "CANCELLED" in output
    assert f"logs/train_{story['run']}.log" in output


def test_the_same_command_goes_on_from_where_it_was_cancelled(story):
    code, output = story["second"]
    assert code == 0, output
    folder = story["folder"]
    log = (folder / "logs" / f"train_{story['run']}.log").read_text(encoding="utf-8")
    assert "going on from step" in log
    assert [metrics_rows(folder, run) for run in RUNS] == [STEPS, STEPS]
    assert all((folder / "results" / run / "report.html").is_file() for run in RUNS)


def test_each_training_is_one_job_with_one_gpu(story):
    jobs = story["jobs"]
    done = [
        job["Comment"] for job in jobs if job["JobState"] == "COMPLETED" and job["Comment"].startswith("rule_train")
    ]
    assert sorted(done) == sorted(f"rule_train_wildcards_{run}" for run in RUNS)
    on_gpu = {job["Comment"].split("_")[1] for job in jobs if gpus(job) == "gpu:1"}
    assert on_gpu == {"model", "train", "evaluate"}
    assert {job["Comment"].split("_")[1] for job in jobs if not gpus(job)} == {"data", "page"}


def test_trainings_wait_for_the_gpu_in_slurms_queue_and_use_it_one_at_a_time(story):
    waiting = [job["Comment"] for job in story["meanwhile"] if job["JobState"] == "PENDING"]
    assert any(comment.startswith("rule_train") for comment in waiting)
    spans = sorted(
        (datetime.fromisoformat(job["StartTime"]), datetime.fromisoformat(job["EndTime"]))
        for job in story["jobs"]
        if gpus(job)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_finished_run_has_nothing_to_do_under_either_profile(story):
    code, output = story["third"]
    assert code == 0 and "Nothing to be done" in output
    code, output = snakemake(story["folder"], "all", config=CONFIG)
    assert code == 0 and "Nothing to be done" in output


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_readme_installs_the_plugin_that_is_tested_here(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    for name in ("snakemake-executor-plugin-slurm", "snakemake-executor-plugin-slurm-jobstep"):
        assert f" {name}=={version(name)}" in text
