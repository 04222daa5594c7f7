"""LoRA in both trainers: small matrices learn, the model itself stays as it was and serves as the KL's reference.

peft takes seconds to import, so only a run that uses it does.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

    Model = PreTrainedModel | PeftModel


def lora_config(rank: int, alpha: float) -> "LoraConfig":
    """Adapters on every linear layer but the head, without dropout: the log-probs must be the sampler's."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether this is peft's wrapper around a model."""
    return hasattr(model, "get_base_model")


def causal_model(model: Any) -> "PreTrainedModel":
    """The model itself, with its adapters at work but without peft's wrapper."""
    return model.get_base_model() if has_adapters(model) else model


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under the checkpoint's names, as a sampler needs them; adapters are added into the matrices they sit on.

    They are added to copies. Merging in place and taking out again, as TRL does, leaves rounding errors behind.
    """
    base = causal_model(model)
    adapted = {name: layer for name, layer in base.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, parameter in base.named_parameters():
        layer, inside, kind = name.partition(".base_layer.")
        if inside and kind == "weight":
            yield f"{layer}.weight", parameter.detach() + adapted[layer].get_delta_weight("default").detach()
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that learn."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def whole(model: Any) -> Any:
    """The model with its adapters merged in for good; a model without any, as it is."""
    return model.merge_and_unload() if has_adapters(model) else model
