"""The mathematics of GRPO: advantages, log-probs, loss. Pure functions on tensors.

Names and conventions follow TRL's GRPOTrainer, so that the two runs can be held against each other; where a formula
comes from a paper, its docstring says which. `tests/test_grpo.py` compares each with TRL's own numbers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from scripts.grpo_scratch.rollout import Sample
from scripts.lora import causal_model

if TYPE_CHECKING:
    from scripts.lora import Model

ADVANTAGE_EPSILON = 1e-4  # keeps a group of nearly equal rewards finite; TRL's value
LOGITS_AT_ONCE = 2**27  # numbers; 0.5 GiB in fp32


@dataclass
class Batch:
    """Sequences of prompt and completion, padded on the right; T is the longest sequence less one.

    Padding needs no attention mask: tokens see only what stands before them, so none that counts sees padding.
    Everything but `input_ids` is aligned with predictions: position t speaks of token t + 1.
    """

    input_ids: torch.Tensor  # (B, T + 1) int64
    completion_mask: torch.Tensor  # (B, T) bool: token t + 1 belongs to the completion
    sampler_logprobs: torch.Tensor  # (B, T) fp32, 0 outside the completion
    advantages: torch.Tensor  # (B,) fp32
    old_logprobs: torch.Tensor | None = None  # (B, T) fp32; None: those of the policy in hand
    reference_logprobs: torch.Tensor | None = None  # (B, T) fp32; None: no KL


def collate(samples: list[Sample], advantages: torch.Tensor, pad_id: int, device: torch.device) -> Batch:
    """Pad samples and their advantages (B,) into one batch on `device`."""
    length = max(len(s.prompt_ids) + len(s.completion.token_ids) for s in samples)
    input_ids = torch.full((len(samples), length), pad_id)
    completion_mask = torch.zeros(len(samples), length - 1, dtype=torch.bool)
    sampler_logprobs = torch.zeros(len(samples), length - 1)
    for i, s in enumerate(samples):
        start, end = len(s.prompt_ids), len(s.prompt_ids) + len(s.completion.token_ids)
        input_ids[i, :end] = torch.tensor(s.prompt_ids + s.completion.token_ids)
        completion_mask[i, start - 1 : end - 1] = True
        sampler_logprobs[i, start - 1 : end - 1] = torch.tensor(s.completion.logprobs)
    batch = (input_ids, completion_mask, sampler_logprobs, advantages)
    return Batch(*(t.to(device) for t in batch))


def micro_batches(
    samples: list[Sample], advantages: torch.Tensor, max_tokens: int, pad_id: int, device: torch.device
) -> list[Batch]:
    """Cut samples with their advantages (B,) into batches of at most `max_tokens` tokens, padding included.

    Short sequences go together, which saves padding. So do those without an advantage: they have no gradient, and a
    batch of nothing else needs no backward pass. A sequence longer than `max_tokens` makes a batch of its own.
    """

    def kind(i: int) -> tuple[bool, int]:
        return bool(advantages[i] == 0), len(samples[i].prompt_ids) + len(samples[i].completion.token_ids)

    chunks: list[list[int]] = []
    for i in sorted(range(len(samples)), key=kind):
        idle, length = kind(i)  # the longest so far
        if not chunks or kind(chunks[-1][0])[0] != idle or (len(chunks[-1]) + 1) * length > max_tokens:
            chunks.append([])
        chunks[-1].append(i)
    return [collate([samples[i] for i in chunk], advantages[chunk], pad_id, device) for chunk in chunks]


def group_advantages(rewards: torch.Tensor, scale_rewards: str = "group") -> torch.Tensor:
    """Step 3: how much better each completion is than its group, (P, G) rewards -> (P, G) advantages.

    A = (r - mean_group(r)) / (std(r) + 1e-4), DeepSeekMath (arXiv:2402.03300) section 4.1.2; the unbiased std and 1e-4
    as TRL's. `scale_rewards` takes the std over the `group`, over the whole `batch` (arXiv:2508.08221), or leaves the
    division out with `none` (Dr. GRPO, arXiv:2503.20783).

    A group of equal rewards gets exactly 0. (TRL leaves it what rounding makes of 0.1 - mean(0.1, ...): up to 1e-4.)
    """
    centered = (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(degenerate(rewards)[:, None], 0.0)
    if scale_rewards == "none":
        return centered
    std = rewards.std(dim=1, keepdim=True) if scale_rewards == "group" else rewards.std()
    return centered / (std + ADVANTAGE_EPSILON)


def degenerate(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups have equal rewards throughout, so that nothing can be learned from them: (P, G) -> (P,) bool."""
    return rewards.amax(dim=1) == rewards.amin(dim=1)


def sequence_logprobs(model: "Model", batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the completion tokens and the entropy of the distributions they were drawn from, in nats.

    Returns:
        (B, T) fp32 log-probs with gradient and (B, T) fp32 entropies without, both 0 outside the completion. Logits are
        divided by the sampling temperature, as TRL does, so that they describe the distribution that was sampled.
    """
    causal = causal_model(model)
    hidden = causal.base_model(batch.input_ids, use_cache=False).last_hidden_state  # (B, T + 1, H)
    mask = batch.completion_mask
    # Only the N completion tokens meet the vocabulary.
    chosen, entropy = token_logprobs(
        causal.get_output_embeddings(), hidden[:, :-1][mask], batch.input_ids[:, 1:][mask], temperature
    )
    zeros = torch.zeros(mask.shape, device=mask.device)
    return zeros.masked_scatter(mask, chosen), zeros.masked_scatter(mask, entropy)


def token_logprobs(
    head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, H) hidden states and (N,) tokens -> (N,) log-probs of the tokens and (N,) entropies, fp32.

    The (N, V) logits would be by far the largest tensor of a step (64 x 512 tokens x 150,000 words: 18 GiB), so they
    are made piece by piece, and made again for the backward pass.
    """

    size = max(1, LOGITS_AT_ONCE // head.get_parameter("weight").shape[0])
    pieces = [
        checkpoint(logprobs_of_piece, head, h, t, temperature, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    chosen, entropy = zip(*pieces, strict=True)
    return torch.cat(chosen), torch.cat(entropy)


def logprobs_of_piece(
    head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` at once."""
    logprobs = (head(hidden).float() / temperature).log_softmax(-1)  # (n, V)
    everything = logprobs.detach()
    entropy = -(everything.exp() * everything).sum(-1)  # (n,)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


class Mismatch(NamedTuple):
    """How far the sampler's log-probs lie from the trainer's, raw, and the weights that make up for it."""

    weights: torch.Tensor  # (B, T), or (B, 1) for the sequence modes and for `none`
    ratio: torch.Tensor  # likewise: before the cap
    difference: torch.Tensor  # (B, T) nats, |trainer - sampler|
    kl: torch.Tensor  # (B, T) nats, k3 estimate of KL(sampler || trainer)


def sampler_mismatch(
    trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor, mode: str, cap: float
) -> Mismatch:
    """Compare the policy before its update with the engine that sampled for it, and weigh the samples accordingly.

    The importance ratio trainer / sampler of each token, or of the whole sequence, is cut at `cap` (truncate) or set to
    0 above it (mask); `none` weighs everything 1. The modes are TRL's (`vllm_importance_sampling_mode`); token_truncate
    is the truncated importance sampling of Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training". A token that the engine could not score (NaN) counts as equal, as in TRL.

    Args:
        trainer_logprobs, sampler_logprobs: (B, T) fp32; no gradient flows.
        mask: (B, T) bool, the completion tokens.
        mode: none, token_truncate, token_mask, sequence_truncate or sequence_mask.
    """
    log_ratio = (trainer_logprobs.detach() - sampler_logprobs).nan_to_num(nan=0.0) * mask  # (B, T)
    whole = log_ratio.sum(1, keepdim=True) if mode.startswith("sequence") else log_ratio
    ratio = whole.exp()
    if mode == "none":
        weights = torch.ones_like(ratio[:, :1])
    elif mode.endswith("truncate"):
        weights = ratio.clamp(max=cap)
    else:
        weights = ratio.masked_fill(ratio > cap, 0.0)
    return Mismatch(weights, ratio, log_ratio.abs(), log_ratio.exp() - 1 - log_ratio)


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """(B, T) estimate of KL(policy || reference) a token, from tokens that the policy drew; d = policy - reference.

    Schulman's estimators (joschu.net/blog/kl-approx.html): `k1` = d, unbiased and noisy; `k2` = d^2 / 2, biased and
    quiet; `k3` = exp(-d) - 1 + d, unbiased, never negative (DeepSeekMath equation 4; the one that TRL has).
    As a loss, k2 has the KL's gradient as it is; k1 and k3 have it when they are multiplied by the importance ratio
    (`kl_penalty`), and without that k1 has none on average.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1 + difference


def kl_penalty(kl: torch.Tensor, ratio: torch.Tensor, estimator: str, bias_correction: bool) -> torch.Tensor:
    """The KL as it enters the loss, (B, T): times the importance ratio, so that its gradient on policy is the KL's.

    DeepSeek-V3.2 (arXiv:2512.02556); TRL: `use_bias_correction_kl`. With a ratio of sequences it is no longer exact.
    k2 stays as it is: its gradient is the KL's already.
    """
    return kl * ratio if bias_correction and estimator != "k2" else kl


def importance_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, level: str
) -> torch.Tensor:
    """Policy / old policy, of each token (B, T), or one for each sequence (B, 1).

    `token`: exp(log pi - log pi_old), PPO's (arXiv:1707.06347, section 3). `sequence`: its geometric mean over the
    completion, GSPO (arXiv:2507.18071, equation 7). TRL: `importance_sampling_level`.
    """
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A), and where that clip took the gradient away (bool).

    PPO (arXiv:1707.06347, equation 7) with DAPO's higher upper bound (arXiv:2503.14476, equation 10); TRL: `epsilon`,
    `epsilon_high`. Where A < 0 the ratio has no upper bound there; `delta` sets one (INTELLECT-2, arXiv:2505.07291),
    which is not counted as a clip, as in TRL.

    Args:
        ratio: (B, T) or (B, 1).
        advantages: (B, 1).
    """
    within = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    too_low = (bounded < 1 - epsilon) & (advantages < 0)
    too_high = (bounded > 1 + epsilon_high) & (advantages > 0)
    return torch.min(bounded * advantages, within * advantages), too_low | too_high


def cispo_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(rho, epsilon_high) A log pi without a gradient through the ratio, and where the cap was met (bool).

    CISPO (MiniMax-M1, arXiv:2506.13585, equation 4): no token loses its gradient, it only weighs less. `epsilon_high`
    is the cap on the ratio itself, as in TRL (ScaleRL, arXiv:2510.13786, takes 5).
    """
    capped = ratio.clamp(max=epsilon_high).detach()
    return capped * advantages * logprobs, (ratio > epsilon_high) & (advantages > 0)


class Terms(NamedTuple):
    """What the loss was made of, for the metrics. Without gradient; (B, 1) where the setting speaks of sequences."""

    ratio: torch.Tensor  # (B, T) or (B, 1)
    clipped: torch.Tensor  # bool, likewise
    mismatch: Mismatch
    kl: torch.Tensor | None  # (B, T) to the reference, as it stands in the loss


def grpo_loss(
    logprobs: torch.Tensor, batch: Batch, settings: Any, sequences: int, tokens: int
) -> tuple[torch.Tensor, Terms]:
    """Step 4: this micro-batch's part of the step's loss; the parts of all micro-batches add up to it.

    A token's loss is the negative objective (`clipped_objective`, or `cispo_objective`) times the weight that corrects
    for the sampler (`sampler_mismatch`), plus beta KL (DeepSeekMath, equation 3);
    `token_share` says how much it counts in the mean over the step.

    Args:
        logprobs: (B, T) fp32 with gradient, of the policy in training.
        settings: the grpo section.
        sequences: completions in the whole step, those left out as truncated too.
        tokens: completion tokens in the whole step, without those left out.

    Returns:
        The loss (scalar), and what it was made of.
    """
    mask = batch.completion_mask
    # As long as one update follows each batch, the old policy is the one in hand and the ratio is exactly 1.
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    old = old.where(~old.isnan(), logprobs.detach())  # tokens that the engine could not score
    ratio = importance_ratio(logprobs, old, mask, settings.importance_level)
    advantages = batch.advantages[:, None]  # (B, 1)
    if settings.loss_type == "cispo":
        objective, clipped = cispo_objective(ratio, advantages, logprobs, settings.epsilon_high)
    else:
        objective, clipped = clipped_objective(
            ratio, advantages, settings.epsilon, settings.epsilon_high, settings.delta
        )
    # Where the sampler's log-probs serve as the old ones, they are still held against the trainer's own.
    trainer = logprobs if settings.old_logprobs == "sampler" else old
    mismatch = sampler_mismatch(
        trainer, batch.sampler_logprobs, mask, settings.importance_correction, settings.importance_cap
    )
    losses = -objective * mismatch.weights
    kl = None
    if batch.reference_logprobs is not None:
        kl = kl_estimate(logprobs, batch.reference_logprobs, settings.kl_estimator)
        kl = kl_penalty(kl, ratio, settings.kl_estimator, settings.kl_bias_correction)
        losses = losses + settings.beta * kl
    share = token_share(mask, settings.loss_type, sequences, tokens, settings.max_completion_tokens)
    loss = (losses * share * mask).sum()
    return loss, Terms(ratio.detach(), clipped, mismatch, None if kl is None else kl.detach())


def token_share(
    mask: torch.Tensor, loss_type: str, sequences: int, tokens: int, max_completion_tokens: int
) -> torch.Tensor:
    """How much each token counts in the mean over the step, as (B, 1) fp32.

    `grpo` averages the tokens of a completion, then the completions (DeepSeekMath equation 3); `dapo`, `cispo` and
    `bnpo` average all tokens of the step, as TRL does (DAPO equation 12 those of one question; TRL's bnpo those of one
    micro-batch); `dr_grpo` divides by the longest allowed length, so that length is neither rewarded nor punished
    (arXiv:2503.20783). TRL: `loss_type`.
    """
    if loss_type == "grpo":
        return 1 / (mask.sum(1, keepdim=True).clamp(min=1) * sequences)
    count = sequences * max_completion_tokens if loss_type == "dr_grpo" else max(tokens, 1)
    return torch.full((mask.shape[0], 1), 1 / count, device=mask.device)
