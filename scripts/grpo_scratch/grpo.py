"""The mathematics of GRPO: advantages, log-probs, loss. Pure functions on tensors.

Names and conventions follow TRL's GRPOTrainer, so that the two runs can be held against each other; where a formula
comes from a paper, its docstring says which.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from transformers import PreTrainedModel

from scripts.grpo_scratch.rollout import Sample

ADVANTAGE_EPSILON = 1e-4  # keeps a group of equal rewards finite; TRL's value


@dataclass
class Batch:
    """Sequences of prompt and completion, padded on the right; T is the longest sequence less one.

    Everything but `input_ids` is aligned with predictions: position t speaks of token t + 1.
    """

    input_ids: torch.Tensor  # (B, T + 1) int64
    attention_mask: torch.Tensor  # (B, T + 1) int64
    completion_mask: torch.Tensor  # (B, T) bool: token t + 1 belongs to the completion
    sampler_logprobs: torch.Tensor  # (B, T) fp32, 0 outside the completion
    advantages: torch.Tensor  # (B,) fp32


def collate(samples: list[Sample], advantages: torch.Tensor, pad_id: int, device: torch.device) -> Batch:
    """Pad samples and their advantages (B,) into one batch on `device`."""
    length = max(len(s.prompt_ids) + len(s.completion.token_ids) for s in samples)
    input_ids = torch.full((len(samples), length), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    completion_mask = torch.zeros(len(samples), length - 1, dtype=torch.bool)
    sampler_logprobs = torch.zeros(len(samples), length - 1)
    for i, s in enumerate(samples):
        start, end = len(s.prompt_ids), len(s.prompt_ids) + len(s.completion.token_ids)
        input_ids[i, :end] = torch.tensor(s.prompt_ids + s.completion.token_ids)
        attention_mask[i, :end] = 1
        completion_mask[i, start - 1 : end - 1] = True
        sampler_logprobs[i, start - 1 : end - 1] = torch.tensor(s.completion.logprobs)
    batch = (input_ids, attention_mask, completion_mask, sampler_logprobs, advantages)
    return Batch(*(t.to(device) for t in batch))


def group_advantages(rewards: torch.Tensor, scale_rewards: str = "group") -> torch.Tensor:
    """Step 3: how much better each completion is than its group, (P, G) rewards -> (P, G) advantages.

    A = (r - mean_group(r)) / (std(r) + 1e-4), DeepSeekMath (arXiv:2402.03300) section 4.1.2; the unbiased std and 1e-4
    as TRL's. `scale_rewards` takes the std over the `group`, over the whole `batch` (arXiv:2508.08221), or leaves the
    division out with `none` (Dr. GRPO, arXiv:2503.20783).
    """
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    if scale_rewards == "none":
        return centered
    std = rewards.std(dim=1, keepdim=True) if scale_rewards == "group" else rewards.std()
    return centered / (std + ADVANTAGE_EPSILON)


def sequence_logprobs(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the completion tokens and the entropy of the distributions they were drawn from, in nats.

    Returns:
        (B, T) fp32 log-probs with gradient and (B, T) fp32 entropies without, both 0 outside the completion. Logits are
        divided by the sampling temperature, as TRL does, so that they describe the distribution that was sampled.
    """
    hidden = model.base_model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state  # (B, T + 1, H)
    mask = batch.completion_mask
    # Only the N completion tokens meet the vocabulary: logits are by far the largest tensor here.
    logits = model.lm_head(hidden[:, :-1][mask]).float().div_(temperature)  # (N, V)
    chosen = -F.cross_entropy(logits, batch.input_ids[:, 1:][mask], reduction="none")  # (N,)
    # In pieces, because p log p of all tokens at once would take as much memory again as the logits.
    entropy = torch.cat([Categorical(logits=piece).entropy() for piece in logits.detach().split(1024)])  # (N,)
    zeros = torch.zeros(mask.shape, device=mask.device)
    return zeros.masked_scatter(mask, chosen), zeros.masked_scatter(mask, entropy)


def importance_weights(logprobs: torch.Tensor, batch: Batch, mode: str, cap: float) -> torch.Tensor:
    """Weights that correct for sampling with another engine than the one that is trained.

    The ratio trainer / sampler of each token, or of the whole sequence, is cut at `cap` (truncate) or set to 0 above it
    (mask). TRL: `vllm_importance_sampling_mode`; Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training".

    Returns:
        (B, T) for the token modes, (B, 1) for the sequence modes and for `none`; no gradient.
    """
    log_ratio = (logprobs.detach() - batch.sampler_logprobs) * batch.completion_mask  # (B, T)
    if mode == "none":
        return torch.ones_like(log_ratio[:, :1])
    level, cut = mode.split("_")
    ratio = (log_ratio.sum(1, keepdim=True) if level == "sequence" else log_ratio).exp()
    return ratio.clamp(max=cap) if cut == "truncate" else ratio.masked_fill(ratio > cap, 0.0)


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """(B, T) estimate of KL(policy || reference) a token: exp(d) - d - 1 with d = reference - policy.

    Schulman's k3 (joschu.net/blog/kl-approx.html), DeepSeekMath equation 4; never negative, unbiased.
    """
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    settings: Any,
    sequences: int,
    tokens: int,
    importance: torch.Tensor,
    kl: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 4: this micro-batch's part of the step's loss; the parts of all micro-batches add up to it.

    A token's loss is -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) with rho = exp(logprobs - old_logprobs):
    PPO's clipped objective (arXiv:1707.06347, equation 7) with DAPO's higher upper bound (arXiv:2503.14476, equation
    10), times the `importance` weights, plus beta KL (DeepSeekMath, equation 3).

    Args:
        logprobs, old_logprobs: (B, T) fp32, of the policy in training and of the policy that the batch was drawn from.
        settings: epsilon, epsilon_high, beta, loss_type, max_completion_tokens.
        sequences, tokens: completions and completion tokens in the whole step.
        importance: (B, T) or (B, 1), from `importance_weights`.
        kl: (B, T) from `kl_estimate`, needed where beta is above 0.

    Returns:
        The loss (scalar) and (B, T) bool: where the clip took the gradient away.
    """
    ratio = (logprobs - old_logprobs).exp()  # (B, T)
    advantages = batch.advantages[:, None]  # (B, 1)
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon_high)
    losses = -torch.min(ratio * advantages, clipped * advantages) * importance  # (B, T)
    if kl is not None:
        # TRL multiplies the KL by the ratio (use_bias_correction_kl), which makes its gradient unbiased
        # (DeepSeek-V3.2, arXiv:2512.02556).
        losses = losses + settings.beta * kl * ratio
    share = token_share(batch.completion_mask, settings.loss_type, sequences, tokens, settings.max_completion_tokens)
    loss = (losses * share * batch.completion_mask).sum()
    too_low = (ratio < 1 - settings.epsilon) & (advantages < 0)
    too_high = (ratio > 1 + settings.epsilon_high) & (advantages > 0)
    return loss, (too_low | too_high) & batch.completion_mask


def token_share(
    mask: torch.Tensor, loss_type: str, sequences: int, tokens: int, max_completion_tokens: int
) -> torch.Tensor:
    """How much each token counts in the mean over the step, as (B, 1) fp32.

    `grpo` averages the tokens of a completion, then the completions (DeepSeekMath equation 3); `dapo` and `bnpo`
    average all tokens of the step (DAPO equation 10; TRL's bnpo averages each micro-batch by itself); `dr_grpo` divides
    by the longest allowed length, so that length is neither rewarded nor punished (arXiv:2503.20783).
    """
    if loss_type == "grpo":
        return 1 / (mask.sum(1, keepdim=True).clamp(min=1) * sequences)
    count = sequences * max_completion_tokens if loss_type == "dr_grpo" else max(tokens, 1)
    return torch.full((mask.shape[0], 1), 1 / count, device=mask.device)
