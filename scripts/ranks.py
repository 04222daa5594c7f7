"""Several processes that train one model, one GPU each: prompts are split, completions shared, gradients added up.

python -m scripts.ranks 2 scripts.grpo_scratch.train --run scratch-2 ...

torchrun starts them and torch.distributed connects them. In a single process every function here does nothing.
"""

import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from signal import SIGTERM
from typing import TypeVar

import torch
import torch.distributed as dist

from scripts.settings import SettingsError

Item = TypeVar("Item")


def launch(processes: str, module: str, *arguments: str) -> None:
    """`torchrun --standalone --nproc-per-node PROCESSES -m MODULE ARGUMENTS`, whose traces add nothing to a message."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun would give each a single thread
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(processes))))
    # Asked to stop, a process still ends its step and writes a checkpoint.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # "--": torchrun would take --run for one of its own options
    options = ["--standalone", "--nproc-per-node", processes, "-m", "--", module, *arguments]
    try:
        run.run(run.parse_args(options))
    except SignalException as signal:
        sys.exit(128 + signal.sigval)
    except ChildFailedError as error:
        # who was killed comes before who then lost touch, and both before whom torchrun then told to end
        rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode == -SIGTERM, item[1].exitcode))
        if failure.exitcode >= 0:
            sys.exit(failure.exitcode)  # it has said itself what was wrong
        number = -failure.exitcode
        print(f"process {rank} of {processes} was ended by signal {number}; the others with it", file=sys.stderr)
        sys.exit(128 + number)


def start(processes: int) -> None:
    """Join the other processes of this run.

    Raises:
        SettingsError: their number is not that of the settings, or there are fewer GPUs.
    """
    started = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1  # by torchrun
    if started != processes:
        raise SettingsError(
            f"grpo.processes is {processes}, but {started} started; python -m scripts.ranks {processes} MODULE ... "
            "starts as many"
        )
    if processes == 1:
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        if torch.cuda.device_count() < processes:
            raise SettingsError(f"grpo.processes is {processes}, but only {torch.cuda.device_count()} GPUs are visible")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")


def leave() -> None:
    """End the group of one that vLLM has made for itself: on a GPU torch would warn of it at exit.

    A group of several ends with its processes; one that stops by itself would wait for the others here.
    """
    if dist.is_initialized() and count() == 1:
        dist.destroy_process_group()


weakref.finalize(dist, leave)  # at exit the earliest goes last: after vLLM's own, which in 0.31 ends the group itself


def count() -> int:
    """Processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def first() -> bool:
    """Whether this is the process that writes files and speaks for all."""
    return count() == 1 or dist.get_rank() == 0


def share(items: Sequence[Item]) -> Sequence[Item]:
    """This process's part of `items`; neighbours stay together."""
    if count() == 1:
        return items
    rank, size = dist.get_rank(), count()
    return items[len(items) * rank // size : len(items) * (rank + 1) // size]


def gather(items: list[Item]) -> list[Item]:
    """The items of all processes, in the order of the processes; every process gets them."""
    if count() == 1:
        return items
    parts: list[list[Item]] = [[]] * count()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def totals(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of all processes, added up name by name."""
    summed: dict[str, float] = {}
    for part in gather([numbers]):
        for name, number in part.items():
            summed[name] = summed.get(name, 0) + number
    return summed


def add_up_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Every process's gradient becomes the sum of all; a process without one adds nothing."""
    if count() == 1:
        return
    pending = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        pending.append(dist.all_reduce(parameter.grad, async_op=True))
    for reduction in pending:
        reduction.wait()


if __name__ == "__main__":
    launch(*sys.argv[1:])
