"""What the benchmark asks of the GPU: memory in use, its bandwidth, and the least time of a rollout by that."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.memory import GIB


@contextmanager
def gpu_memory() -> Iterator[list[float]]:
    """GiB in use on the GPU by the driver's figure, beyond what was before, every 50 ms; without a GPU only 0."""
    if not torch.cuda.is_available():
        yield [0.0]
        return
    import pynvml  # comes with vLLM on CUDA

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    device = pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)
    before = pynvml.nvmlDeviceGetMemoryInfo(device).used
    sampled, ended = [0.0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.05):
            sampled.append((pynvml.nvmlDeviceGetMemoryInfo(device).used - before) / GIB)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield sampled
    finally:
        ended.set()
        thread.join()


def copied_bytes_a_second() -> float:
    """Bytes a second, read and written, while the GPU copies a GiB to another place in its memory."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(50):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 50 * 2 * GIB / (start.elapsed_time(end) / 1000)


def least_bytes(config: Any, parameters: int, sequences: int, mean: Any, longest: Any) -> Any:
    """Bytes that a rollout reads from memory at the very least, weights, keys and values in 2 bytes each.

    Each decode step reads the weights once; of an input embedding that is not the head too, it needs a few rows only.
    A token reads keys and values of those before it: over sequences of `mean` tokens that is least where all are
    equally long. Those of the prompts are left out.

    Args:
        config: the model's, of transformers.
        parameters: all of the model's; a head tied to the embedding counts once.
        mean, longest: tokens of a completion; numbers, or columns of them.
    """
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_token = 2 * config.num_hidden_layers * getattr(config, "num_key_value_heads", heads) * head_dim * 2
    return longest * parameters * 2 + sequences * mean * (mean + 1) / 2 * of_token


def measured_bandwidth() -> float | None:
    """`copied_bytes_a_second`, measured in a process of its own; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # what it takes on the GPU goes with it
        return pool.apply(copied_bytes_a_second)


def least_seconds(model: Path, grpo: dict[str, Any], rows: pd.DataFrame, bandwidth: float | None) -> pd.Series | None:
    """Seconds of the rollout of each step if only memory traffic counted; None without a bandwidth (bytes a second).

    Args:
        rows: of metrics.csv.
    """
    if bandwidth is None:
        return None
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    sequences = grpo["prompts_per_step"] * grpo["group_size"]
    mean, longest = rows["completion_length_mean"], rows["completion_length_max"]
    return least_bytes(config, parameters, sequences, mean, longest) / bandwidth
