"""What the command lines of training and evaluation share."""

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from scripts.prepared import DataError, ModelFilesError
from scripts.settings import SettingsError, load, read, run_settings

# A full disk, a quota, a limit on the size of a file, a folder or file that may not be written.
BEYOND_US = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}


class RunStopped(Exception):
    """A training run ends before its last step; the message says why, and what to do."""


def run_arguments(doc: str | None) -> argparse.Namespace:
    """Parse the arguments of a trainer. `settings` is the run's, given as JSON or read from config.yaml."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="name of the run, one of runs: in config.yaml")
    parser.add_argument("--model", type=Path, required=True, help="prepared model, models/<id>")
    parser.add_argument("--data", type=Path, required=True, help="prepared questions, data/<id>")
    parser.add_argument("--out", type=Path, required=True, help="results/<run>")
    parser.add_argument("--settings", type=json.loads, help="the run's settings as JSON; default: from config.yaml")
    parser.add_argument(
        "--tracking", default="none", choices=["none", "tensorboard", "wandb"], help="also send metrics to"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=0, help="steps between checkpoints; default: 0, only when interrupted"
    )
    args = parser.parse_args()
    if args.settings is None:
        settings = load(read(Path("config.yaml")))
        if args.run not in settings["runs"]:
            sys.exit(f"--run: config.yaml has no run {args.run!r} (it has {', '.join(settings['runs'])})")
        args.settings = run_settings(settings, args.run)
    return args


def check_gpu(settings: dict[str, Any], here: bool) -> None:
    """Stop a stage of full scale where torch sees no GPU, before it has loaded anything.

    Raises:
        SettingsError: with the way out.
    """
    if settings["scale"] == "full" and not here:
        raise SettingsError(
            "scale: full needs an NVIDIA GPU, and torch sees none here. `make doctor` says why (driver, CUDA build of "
            "torch, CUDA_VISIBLE_DEVICES); scale: demo needs none"
        )


class OwnStop(RunStopped):
    """One process of a run stops by itself, for what happened on its GPU."""


@contextmanager
def errors_for_people() -> Iterator[None]:
    """What a person can mend, and Ctrl-C, end the program with a message instead of a traceback."""
    try:
        yield
    except RunStopped as error:
        first = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0"
        sys.exit(str(error) if first or isinstance(error, OwnStop) else 1)  # but for those, all processes stop alike
    except (SettingsError, ModelFilesError, DataError) as error:
        sys.exit(str(error))
    except OSError as error:
        if error.errno not in BEYOND_US:
            raise
        sys.exit(f"{error}; the same command goes on once that is mended")
    except SafetensorError as error:  # its own way of saying that a file could not be written
        sys.exit(f"the model could not be written: {error}; the same command goes on once that is mended")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # Python's words, and torch's
            sys.exit(
                "There is not enough memory, or a limit (`ulimit -v`) holds this process below what there is. Raise "
                "the limit or close other programs, or lower grpo.max_tokens_per_micro_batch or engine.memory_gib"
            )
        if "TORCHELASTIC_RUN_ID" in os.environ and re.search("by peer|peer closed|remote process", str(error)):
            sys.exit("another process of this run has ended, so this one ends too")
        if "out of memory" not in str(error):  # torch's words, and CUDA's
            raise
        sys.exit(
            f"{str(error).splitlines()[0]}\nThe GPU's memory is full: lower grpo.max_tokens_per_micro_batch or "
            "engine.memory_gib, or set grpo.gradient_checkpointing: true or engine.sleep: always; nvidia-smi names who "
            "else holds some. With any of these changed the same command goes on from the last checkpoint"
        )
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command runs this stage again")
