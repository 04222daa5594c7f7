"""The memory of a training on a GPU in GiB: predicted before it begins, measured while it goes.

What the policy needs beside the engine decides whether the engine must sleep while the policy learns.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.settings import SettingsError

GIB = 2**30
# CUDA's context and libraries with what torch's allocator holds and cannot use, and what an engine keeps in its sleep.
# The first is what the other parts of four trainings on an H200 left of the driver's figure: 2.1 to 2.5 GiB. The second
# was measured there: 0.5 of 6.2.
CONTEXT, ASLEEP = 2.3, 0.5
EXPANDABLE = "expandable_segments:True"


def predict(model_dir: Path, cfg: Any, engine_gib: float, logits: int) -> dict[str, float]:
    """The parts of a training by the settings `cfg`, in GiB.

    Weights, gradients and AdamW's two moments are exact; the rest is estimated. A Llama or Qwen layer keeps about
    8 I + 26 H + 10 (Q + K) bytes a token for its backward pass under bf16 autocast (I: width of the MLP, H: hidden, Q
    and K: of all query and of all key heads; 6 of the 10 are for norms of queries and keys, which not every model has).
    With gradient checkpointing the layers keep their input alone, and one at a time the rest.

    Args:
        logits: numbers of them that exist at once.
    """
    config = AutoConfig.from_pretrained(model_dir)
    text = config.get_text_config()
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    width = 4 if cfg.weights_dtype == "fp32" else 2
    learning = 0 if cfg.lora_rank else weights  # adapters are small
    hidden, heads, layers = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
    head = getattr(text, "head_dim", None) or hidden // heads
    queries, keys = head * heads, head * (getattr(text, "num_key_value_heads", None) or heads)
    mlp = getattr(text, "intermediate_size", None) or 4 * hidden
    tokens = cfg.max_tokens_per_micro_batch
    layer = (8 * mlp + 26 * hidden + 10 * (queries + keys)) * tokens
    autocast = width == 4 and cfg.precision == "bf16"
    # Bytes of each weight of the vocabulary while the logits are there: its gradient, in bf16 and as it is kept, and
    # with checkpointing its copy in bf16.
    spare = (width + 2 * autocast) * bool(learning) + 2 * (autocast and cfg.gradient_checkpointing)
    vocabulary = 10 * logits + spare * text.vocab_size * hidden  # logits in bf16 and fp32, and a gradient
    if cfg.gradient_checkpointing:  # the one layer comes when the logits are gone
        activations = 4 * hidden * (layers + 3) * tokens + max(0, layer - vocabulary)
    else:
        activations = layer * layers + 2 * weights * autocast  # and autocast's copies of the weights
    parts = {
        "weights": width * weights,
        "gradients": width * learning,
        "optimizer": 2 * width * learning,
        "reference": width * weights if cfg.beta > 0 and not cfg.lora_rank else 0,
        "activations": activations,
        "logits": vocabulary,
    }
    return {name: n / GIB for name, n in parts.items()} | {"engine": engine_gib, "CUDA": CONTEXT}


def peak(parts: dict[str, float], sleeps: bool) -> float:
    """The most that is needed at once: everything, or, with an engine that sleeps, the larger of the two halves."""
    if not sleeps:
        return sum(parts.values())
    sampling = sum(parts[name] for name in ("weights", "optimizer", "reference", "engine", "CUDA"))
    return max(sampling, sum(parts.values()) - parts["engine"] + ASLEEP)


def engine_sleeps(engine: Any, cfg: Any, parts: dict[str, float]) -> bool:
    """Whether the engine gives up its memory while the policy learns. Prints the arithmetic.

    Args:
        engine, cfg: the engine and the grpo section of the settings.

    Raises:
        SettingsError: the allocator's settings would keep what a sleeping engine frees.
    """
    if not torch.cuda.is_available() or engine.name == "transformers" or not importlib.util.find_spec("vllm"):
        return False
    free = torch.cuda.mem_get_info()[0] / GIB
    wanted = engine.sleep == "always" or (engine.sleep == "auto" and peak(parts, False) > free)
    sleeps = wanted and cfg.sync_every == 1  # it wakes up empty, so it needs a push
    print(
        f"memory: {' + '.join(f'{name} {gib:.1f}' for name, gib in parts.items() if gib >= 0.05)} = "
        f"{peak(parts, False):.1f} GiB predicted, {free:.1f} free. "
        + (
            f"The engine sleeps while the policy learns: {peak(parts, True):.1f}"
            if sleeps
            else "The engine stays awake"
        )
        + f" (engine.sleep: {engine.sleep})",
        flush=True,
    )
    allocator = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if sleeps and EXPANDABLE in allocator:
        raise SettingsError(
            f"engine.sleep: with {EXPANDABLE} a sleeping engine may free nothing (PYTORCH_ALLOC_CONF or "
            "PYTORCH_CUDA_ALLOC_CONF sets it); unset it, or set engine.sleep: never"
        )
    return sleeps


def sizes(model: torch.nn.Module, optimizer: Any, reference: torch.nn.Module | None = None) -> dict[str, float]:
    """GiB of the tensors that stay from step to step, and of gradients, which are as large as what learns."""

    def gib(tensors: Any) -> float:
        return sum(t.numel() * t.element_size() for t in tensors) / GIB

    moments = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return {
        "weights": gib(model.parameters()),
        "gradients": gib(p for p in model.parameters() if p.requires_grad),
        "optimizer": gib(moments),
        "reference": gib(reference.parameters()) if reference is not None else 0.0,
    }


def share_of_device(gib: float) -> float:
    """`gib` as vLLM wants it (`gpu_memory_utilization`)."""
    return gib * GIB / torch.cuda.mem_get_info()[1]


def in_use() -> float:
    """GiB in use on the device by the driver's figure; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB
