# What the rules share: the checked settings, and names for what the rules need of them. No rules.
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(workflow.basedir).parent
sys.path.insert(0, str(ROOT))

from scripts import settings as checked
from scripts.sources import imported_sources


def stop(message):
    """End before anything starts. An exception would be shown with its trace."""
    logger.error(message)
    sys.exit(1)


try:
    for file in filter(Path.exists, map(Path, ["config.yaml", *workflow.overwrite_configfiles])):
        checked.read(file)  # Snakemake would take the last of two values without a word
except checked.SettingsError as error:
    stop(f"config.yaml needs a change:\n{error}")


configfile: "config.yaml"


try:
    settings = checked.load(config)
except checked.SettingsError as error:
    stop(f"config.yaml needs a change:\n{error}")

# Asked for on the command line: a rule's own fault would be shown with its trace.
for target in map(Path, sys.argv[1:]):
    if target.parts[:1] == ("results",) and len(target.parts) > 2:
        if target.parts[1] not in {"baseline", *settings["runs"]}:
            stop(f"config.yaml has no run {target.parts[1]!r}; it has {', '.join(settings['runs'])}")

if workflow.is_main_process and config["scale"] == "auto":
    logger.info(f"scale: auto takes {settings['scale']} here; --config scale=full or scale=demo takes the other")

# Every stage is `python -m scripts.X`, run by the Python that runs Snakemake.
PYTHON = sys.executable
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["PYTHONUNBUFFERED"] = "1"
os.environ["SNAKEMAKE_PID"] = str(os.getpid())  # a training stops when it is gone
# Everything stays in the project's folder, and nobody counts who runs it.
os.environ.setdefault("VLLM_CACHE_ROOT", str(ROOT / ".cache" / "vllm"))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# As many GPUs as the largest training takes: the first, unless the user names others.
most = max(run["grpo"]["processes"] for run in settings["runs"].values())
os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(most))))
# Idle threads may spin for a moment, no longer: OpenMP's default makes everything many times slower as soon as another
# process wants a core, and not spinning at all costs small models a third of their speed.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# `--cores 1` means one stage at a time, not one thread: Snakemake would hold every stage to a single one. A shell that is
# asked to stop waits for its stage, which is asked as well and may have a step to end. Whoever is killed says nothing.
shell.prefix(
    "set -euo pipefail; unset OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS; "
    """trap : INT TERM; trap '[ $? -ne 137 ] || echo "$KILLED"' EXIT; """
)
os.environ["KILLED"] = (
    "Killed by signal 9. If nobody did that, memory ran out (`dmesg` or the cluster's log says so). Close other programs "
    "or ask the cluster for more memory; the same command then goes on. Or need less: lower "
    "grpo.max_tokens_per_micro_batch or engine.memory_gib, or set grpo.gradient_checkpointing: true; a training goes on "
    "from its last checkpoint with these, and starts anew with any other setting changed"
)

TRAINERS = {"scratch": "scripts.grpo_scratch.train", "trl": "scripts.trl_grpo.train"}
MODEL = f"models/{Path(settings['model']['name']).name}"
DATA = f"data/{Path(settings['data']['name']).name}"


for section, folder in {"model": "models", "data": "data"}.items():
    source, made = Path(settings[section]["name"]).expanduser().resolve(), Path(folder).resolve()
    if settings[section]["source"] == "local" and (source.is_relative_to(made) or made.is_relative_to(source)):
        stop(
            f"{section}.name: {source} overlaps with {made}, where the pipeline writes and deletes; keep your own files "
            "elsewhere"
        )


def stop_unless_writable():
    """Snakemake would show a trace for some of these, and a training would say it only when it has begun."""
    jobs = list(workflow.dag.needrun_jobs())
    written = {Path(file).parent for job in jobs for file in [*job.output, *job.log]} | {Path("checkpoints")}
    for folder in sorted(written):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            stop(
                f"{place} cannot be written: {place.resolve()} is no folder, is read-only or is somebody else's. Mend "
                "that, or work on a copy of the project; nothing was started"
            )


def touch_what_is_from_the_future():
    """After the clock was set back, what a stage makes would be older than its inputs, and Snakemake would drop it."""
    for folder in ("scripts", "reports", "models", "data", "results"):
        for path in Path(folder).rglob("*"):
            with suppress(OSError):  # it went meanwhile, or is not ours to touch
                if path.is_file() and path.stat().st_mtime > time.time():
                    path.touch()


def as_param(section):
    """Settings as a rule's param: text with sorted keys, so that a reordering reruns nothing; in a function, because
    Snakemake would read the braces of a plain text as wildcards."""
    return lambda wildcards: checked.as_text(section)


def without(section, *names):
    return {name: value for name, value in section.items() if name not in names}


# What an evaluation depends on; its engine never sleeps.
evaluation_settings = {name: settings[name] for name in ("scale", "prompt", "evaluation")}
evaluation_settings["engine"] = without(settings["engine"], "sleep")


def local_files(section):
    """Files of a model or data set that its user keeps in a folder: the stage runs again when they change."""
    folder = Path(section["name"]).expanduser()
    if section["source"] != "local" or not folder.is_dir():
        return []
    return sorted(str(path) for path in folder.rglob("[!.]*") if path.is_file())


def run_settings(wildcards):
    """What the training of a run depends on, as a param."""
    if wildcards.run not in settings["runs"]:
        raise WorkflowError(f"config.yaml has no run {wildcards.run!r}; it has {', '.join(settings['runs'])}")
    return checked.as_text(checked.run_settings(settings, wildcards.run))


def trainer_module(wildcards):
    run_settings(wildcards)
    return TRAINERS[settings["runs"][wildcards.run]["trainer"]]


def processes(wildcards):
    """How many processes share a training; each takes a GPU of its own."""
    run_settings(wildcards)
    return settings["runs"][wildcards.run]["grpo"]["processes"]


def start_trainer(wildcards):
    """What Python starts for a training: the trainer, or several of it that share the work."""
    trainer, together = trainer_module(wildcards), processes(wildcards)
    return trainer if together == 1 else f"scripts.ranks {together} {trainer}"


def trainer_sources(wildcards):
    return imported_sources(trainer_module(wildcards))


def evaluated_model(wildcards):
    """The model that an evaluation looks at: the untrained one for the baseline."""
    return f"{MODEL}/model.json" if wildcards.run == "baseline" else f"results/{wildcards.run}/model/model.json"


def overlaid_runs(wildcards):
    """The runs on the page of a run: those of report.runs, and the run itself."""
    return list(dict.fromkeys([*settings["report"]["runs"], wildcards.run]))
