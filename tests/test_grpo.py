"""The mathematics of GRPO: against values worked out by hand, against naive formulas, and against TRL's trainer."""

import dataclasses
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import settings as project_settings
from scripts.grpo_scratch import grpo
from scripts.grpo_scratch.grpo import (
    Batch,
    cispo_objective,
    clipped_objective,
    collate,
    group_advantages,
    grpo_loss,
    importance_ratio,
    kl_estimate,
    kl_penalty,
    micro_batches,
    sampler_mismatch,
    sequence_logprobs,
    token_logprobs,
    token_share,
)
from scripts.grpo_scratch.rollout import Completion, Sample
from scripts.grpo_scratch.train import Means
from scripts.prepared import read_rows
from scripts.prompts import messages, prompt_text
from scripts.run_record import Clock

CPU = torch.device("cpu")
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
CORRECTIONS = ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
GROUP_SIZE = 4
MAX_TOKENS = 12
CAP = 1.5  # of the importance correction; low, so that some ratios are above it


def sample(prompt: list[int], completion: list[int], logprobs: list[float] | None = None) -> Sample:
    logprobs = [-0.5] * len(completion) if logprobs is None else logprobs
    question = {"id": "train-0", "question": "1 + 1", "gold": "2"}
    return Sample(question, prompt, Completion(completion, logprobs, truncated=False), "")


# Step 3: advantages


def test_advantages_of_a_group_are_centred_and_divided_by_its_own_spread():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]])
    # means 1/2 and 1/2; unbiased stds sqrt(1/3) and 1
    spread = math.sqrt(1 / 3) + 1e-4
    expected = [[0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread], [1.5 / 1.0001] + [-0.5 / 1.0001] * 3]
    torch.testing.assert_close(group_advantages(rewards), torch.tensor(expected))


def test_advantages_scaled_by_the_batch_keep_the_groups_own_mean():
    rewards = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    # mean 1, squared deviations 0 + 1 + 4 + 1 = 6, unbiased variance 2
    spread = math.sqrt(2) + 1e-4
    expected = torch.tensor([[0.5, -0.5], [1.5, -1.5]]) / spread
    torch.testing.assert_close(group_advantages(rewards, "batch"), expected)


def test_advantages_that_are_not_scaled_are_the_differences_to_the_mean():
    rewards = torch.tensor([[1.1, 0.1], [0.0, 0.0]])
    torch.testing.assert_close(group_advantages(rewards, "none"), torch.tensor([[0.5, -0.5], [0.0, 0.0]]))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.1])
def test_a_group_of_equal_rewards_has_no_advantage(scale, reward):
    """0.1 has no exact binary form, so the difference to its mean may be off in the last digit; it must not count."""
    advantages = group_advantages(torch.tensor([[reward] * 7, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]]), scale)
    assert advantages[0].tolist() == [0.0] * 7
    assert advantages[1].abs().min() > 0.4


# Batches


def test_a_batch_aligns_masks_and_logprobs_with_predictions():
    samples = [sample([5, 6, 7], [8, 9], [-0.1, -0.2]), sample([5], [6, 7, 8, 2], [-1.0, -2.0, -3.0, -4.0])]
    batch = collate(samples, torch.tensor([0.5, -0.5]), 0, CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 2]]
    assert batch.completion_mask.tolist() == [[False, False, True, True], [True, True, True, True]]
    torch.testing.assert_close(batch.sampler_logprobs, torch.tensor([[0.0, 0.0, -0.1, -0.2], [-1.0, -2.0, -3.0, -4.0]]))
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_a_batch_pads_on_the_right():
    batch = collate([sample([5, 6], [7]), sample([5], [6, 7, 8, 9, 2])], torch.zeros(2), 1, CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 1, 1], [5, 6, 7, 8, 9, 2]]
    assert batch.completion_mask.tolist() == [[False, True, False, False, False], [True] * 5]


def test_the_pad_token_inside_a_completion_counts():
    """A model may sample the padding token; what counts is where it stands, not which it is."""
    batch = collate([sample([5], [0, 0, 2])], torch.zeros(1), 0, CPU)
    assert batch.completion_mask.tolist() == [[True, True, True]]


def test_an_empty_completion_counts_nothing_and_breaks_nothing(model):
    """No engine gives one (an end-of-sequence token is part of its completion), but the mathematics holds for it."""
    batch = collate([sample([5, 6], []), sample([5, 6], [7, 2])], torch.tensor([1.0, -1.0]), 0, CPU)
    assert batch.completion_mask.sum(1).tolist() == [0, 2]
    logprobs, entropy = sequence_logprobs(model, batch, 1.0)
    assert logprobs[0].tolist() == entropy[0].tolist() == [0.0, 0.0, 0.0]
    for loss_type in LOSS_TYPES:
        for level in ("token", "sequence"):
            config = loss_settings(loss_type=loss_type, importance_level=level, importance_correction="sequence_mask")
            loss, _ = grpo_loss(logprobs, batch, config, 2, 2)
            assert math.isfinite(loss.item())


# Log-probs


@pytest.fixture(scope="module")
def model(demo_model):
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def samples(tokenizer, demo_data) -> list[Sample]:
    """Three groups of four: ragged, some cut at the length limit, one empty. Log-probs come later."""
    rng = random.Random(0)
    found = []
    for question in read_rows(demo_data / "train.jsonl")[:3]:
        prompt = tokenizer.encode(prompt_text(tokenizer, question["question"], ""), add_special_tokens=False)
        for length in (3, 8, MAX_TOKENS, 0 if len(found) == 8 else 1):
            tokens = [rng.randrange(3, len(tokenizer)) for _ in range(length)]
            if 0 < length < MAX_TOKENS:
                tokens[-1] = tokenizer.eos_token_id
            found.append(Sample(question, prompt, Completion(tokens, [0.0] * length, length == MAX_TOKENS), ""))
    return found


@pytest.fixture(scope="module")
def batch(samples, model, tokenizer) -> Batch:
    """All samples; the sampler's log-probs are the model's with noise, so that the correction has work to do."""
    batch = collate(samples, ADVANTAGES.flatten(), tokenizer.pad_token_id, CPU)
    with torch.no_grad():
        logprobs, _ = sequence_logprobs(model, batch, 0.8)
    batch.sampler_logprobs = (logprobs + 0.3 * noise(logprobs, 1)) * batch.completion_mask
    return batch


# The second group is worth the same throughout.
REWARDS = torch.tensor([[1.1, 0.1, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1], [0.0, 1.0, 1.1, 0.1]])
ADVANTAGES = group_advantages(REWARDS)


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def loss_settings(**changes) -> SimpleNamespace:
    defaults = {
        "loss_type": "dapo", "importance_level": "token", "epsilon": 0.2, "epsilon_high": 0.28, "delta": None,
        "beta": 0.0, "kl_estimator": "k3", "kl_bias_correction": True, "importance_correction": "none",
        "importance_cap": CAP, "old_logprobs": "detach", "updates_per_batch": 1, "max_completion_tokens": MAX_TOKENS,
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_a_softmax_over_all_logits(model, batch, temperature):
    logprobs, entropy = sequence_logprobs(model, batch, temperature)
    with torch.no_grad():
        logits = model(batch.input_ids).logits[:, :-1].double() / temperature
    p = torch.log_softmax(logits, -1)
    chosen = p.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1) * batch.completion_mask
    torch.testing.assert_close(logprobs.detach().double(), chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(p.exp() * p).sum(-1) * batch.completion_mask, atol=1e-5, rtol=0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.requires_grad and not entropy.requires_grad


def test_padding_changes_no_logprob(model, samples):
    together, _ = sequence_logprobs(model, collate(samples, torch.zeros(len(samples)), 0, CPU), 1.0)
    for i, s in enumerate(samples):
        alone, _ = sequence_logprobs(model, collate([s], torch.zeros(1), 0, CPU), 1.0)
        torch.testing.assert_close(together[i, : alone.shape[1]], alone[0], atol=1e-5, rtol=0)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_logits_of_all_tokens_are_never_in_memory_at_once(monkeypatch):
    """200 tokens x 1,000 words in pieces of 8 tokens: the same values and gradients, forward and backward."""
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(16, 1000), torch.randn(200, 16), torch.randint(1000, (200,))
    results = []
    for at_once in (8 * 1000, 10**9):
        monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", at_once)
        states = hidden.clone().requires_grad_()
        head.zero_grad()
        with Largest() as largest:
            logprobs, entropy = token_logprobs(head, states, targets, 0.7)
            (logprobs * torch.arange(200)).sum().backward()
        results.append((largest.numbers, [logprobs, entropy, states.grad, head.weight.grad.clone()]))
    (in_pieces, pieces), (at_once, whole) = results
    assert in_pieces == 16 * 1000  # the head's own weights
    assert at_once == 200 * 1000
    for ours, expected in zip(pieces, whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


# KL and the correction for the sampler


def test_kl_estimates_of_known_values():
    """d = policy - reference is 0, 1 and -1."""
    policy, reference = torch.tensor([[-1.0, -1.0, -2.0]]), torch.tensor([[-1.0, -2.0, -1.0]])
    expected = {"k1": [0, 1, -1], "k2": [0, 0.5, 0.5], "k3": [0, math.exp(-1) - 1 + 1, math.exp(1) - 1 - 1]}
    for estimator, values in expected.items():
        torch.testing.assert_close(kl_estimate(policy, reference, estimator), torch.tensor([values]).float())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_of_a_known_pair_of_distributions(estimator):
    """Averaged over what the policy draws, k1 and k3 give the KL itself, k2 nearly."""
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.35, 0.25]).log()
    exact = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * kl_estimate(policy, reference, estimator)).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=0.05 if estimator == "k2" else 1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_has_the_gradient_of_the_kl(estimator):
    """k2 by itself, the others times the ratio, as DeepSeek-V3.2 says. Without it k1's gradient is 0 on average."""
    logits, reference = torch.tensor([0.3, 0.1, -0.4], requires_grad=True), torch.tensor([0.4, 0.35, 0.25]).log()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    policy = logits.log_softmax(0)
    drawn = policy.detach().exp()  # how often each token is drawn
    exact = gradient((policy.exp() * (policy - reference)).sum())
    estimate, ratio = kl_estimate(policy, reference, estimator), (policy - policy.detach()).exp()
    penalty = kl_penalty(estimate, ratio, estimator, bias_correction=True)
    torch.testing.assert_close(gradient((drawn * penalty).sum()), exact, atol=1e-6, rtol=1e-4)
    plain = kl_penalty(estimate, ratio, estimator, bias_correction=False)
    assert plain is estimate
    if estimator == "k1":
        torch.testing.assert_close(gradient((drawn * estimate).sum()), torch.zeros(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("mode", "weights", "raw"),
    [
        ("none", [[1.0], [1.0]], [[2.0, 4.0, 1.0], [0.5, 0.5, 1.0]]),
        ("token_truncate", [[2.0, 3.0, 1.0], [0.5, 0.5, 1.0]], [[2.0, 4.0, 1.0], [0.5, 0.5, 1.0]]),
        ("token_mask", [[2.0, 0.0, 1.0], [0.5, 0.5, 1.0]], [[2.0, 4.0, 1.0], [0.5, 0.5, 1.0]]),
        ("sequence_truncate", [[3.0], [0.25]], [[8.0], [0.25]]),
        ("sequence_mask", [[0.0], [0.25]], [[8.0], [0.25]]),
    ],
)
def test_mismatch_of_known_ratios(mode, weights, raw):
    """Ratios 2 and 4 in the first completion (8 as a whole), 1/2 and 1/2 in the second; the cap is 3."""
    ratios = torch.tensor([[2.0, 4.0, 9.0], [0.5, 0.5, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    found = sampler_mismatch(policy, -1 - ratios.log(), mask, mode, 3.0)
    torch.testing.assert_close(found.weights, torch.tensor(weights))
    torch.testing.assert_close(found.ratio, torch.tensor(raw))
    log2, log4 = math.log(2), math.log(4)
    torch.testing.assert_close(found.difference, torch.tensor([[log2, log4, 0.0], [log2, log2, 0.0]]))
    # KL(sampler || policy) by k3: ratio - 1 - log ratio
    expected = [[1 - log2, 3 - log4, 0.0], [-0.5 + log2, -0.5 + log2, 0.0]]
    torch.testing.assert_close(found.kl, torch.tensor(expected))
    assert not any(values.requires_grad for values in found)


# Step 4: the loss


def two_sequences() -> Batch:
    """Completions of 1 and 3 tokens with advantages 1 and -2."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    return Batch(torch.zeros(2, 4), mask, torch.zeros(2, 3), torch.tensor([1.0, -2.0]))


def ratios_of_two_sequences(batch: Batch) -> torch.Tensor:
    """Log-probs with gradient whose ratios to batch.old_logprobs are 1.5, and 0.5, 1.5, 1."""
    batch.old_logprobs = torch.full((2, 3), -1.0)
    return (batch.old_logprobs + torch.tensor([[1.5, 1.0, 1.0], [0.5, 1.5, 1.0]]).log()).requires_grad_()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # on policy a token's loss is -A: -1 once, 2 three times
        ("grpo", (-1 + 2) / 2),
        ("dapo", (-1 + 2 + 2 + 2) / 4),
        ("bnpo", (-1 + 2 + 2 + 2) / 4),
        ("dr_grpo", (-1 + 2 + 2 + 2) / (2 * 12)),
        ("cispo", (-1 + 2 + 2 + 2) / 4 * -1),  # A log pi instead of A, and log pi is -1
    ],
)
def test_loss_of_two_completions_on_policy(loss_type, expected):
    config = loss_settings(loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else 0.28)
    loss, terms = grpo_loss(torch.full((2, 3), -1.0), two_sequences(), config, 2, 4)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert not (terms.clipped & two_sequences().completion_mask).any()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", (-1.28 + (1.6 + 3.0 + 2.0) / 3) / 2),
        ("dapo", (-1.28 + 1.6 + 3.0 + 2.0) / 4),
        ("bnpo", (-1.28 + 1.6 + 3.0 + 2.0) / 4),
        ("dr_grpo", (-1.28 + 1.6 + 3.0 + 2.0) / 24),
    ],
)
def test_loss_of_two_completions_when_the_clip_is_active(loss_type, expected):
    """Ratios 1.5 with A = 1 (cut to 1.28); 0.5 (raised to 0.8), 1.5 (left: it is the worse one) and 1 with A = -2."""
    batch = two_sequences()
    logprobs = ratios_of_two_sequences(batch)
    loss, terms = grpo_loss(logprobs, batch, loss_settings(loss_type=loss_type), 2, 4)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert terms.clipped.tolist() == [[True, False, False], [True, False, False]]
    loss.backward()
    assert (logprobs.grad == 0).tolist() == [[True, True, True], [True, False, False]]


def test_delta_bounds_the_ratio_of_a_bad_completion():
    """With A = -2 a ratio of 1.5 costs 3.0, and 2.6 with delta 1.3; the gradient is gone."""
    ratio = torch.tensor([[0.5, 1.5, 1.0]], requires_grad=True)
    objective, _ = clipped_objective(ratio, torch.tensor([[-2.0]]), 0.2, 0.28, 1.3)
    torch.testing.assert_close(objective, torch.tensor([[-1.6, -2.6, -2.0]]))
    objective.sum().backward()
    assert (ratio.grad == 0).tolist() == [[True, True, False]]


def test_cispo_weighs_tokens_and_keeps_their_gradient():
    """A log pi, times the ratio up to the cap of 1.2; the gradient is the weight."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    ratio = torch.tensor([[0.5, 1.5]])
    objective, capped = cispo_objective(ratio, torch.tensor([[2.0]]), logprobs, 1.2)
    torch.testing.assert_close(objective, torch.tensor([[0.5 * 2 * -1, 1.2 * 2 * -2]]))
    assert capped.tolist() == [[False, True]]
    objective.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[1.0, 2.4]]))


def test_gspo_takes_one_ratio_a_completion():
    """The geometric mean of its tokens' ratios: 1.5, and (0.5 x 1.5 x 1)^(1/3) = 0.9086."""
    batch = two_sequences()
    logprobs = ratios_of_two_sequences(batch)
    ratio = importance_ratio(logprobs, batch.old_logprobs, batch.completion_mask, "sequence")
    torch.testing.assert_close(ratio, torch.tensor([[1.5], [0.75 ** (1 / 3)]]))
    loss, terms = grpo_loss(logprobs, batch, loss_settings(loss_type="grpo", importance_level="sequence"), 2, 4)
    assert loss.item() == pytest.approx((-1.28 + 2 * 0.75 ** (1 / 3)) / 2, rel=1e-6)
    assert terms.clipped.tolist() == [[True], [False]]
    loss.backward()
    # d(2 s) = 2 s / 3 for each token of the second, halved by the mean over two completions
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0] * 3, [0.75 ** (1 / 3) / 3] * 3]))


@pytest.mark.parametrize(("bias_correction", "factor"), [(True, 1.1), (False, 1.0)])
def test_loss_with_importance_weights_and_kl(bias_correction, factor):
    """Importance weighs the policy's part, not the KL's. Ratios are 1.1; sampler ratios 2, cut to 1.5; d is log 2."""
    batch = two_sequences()
    batch.old_logprobs = torch.full((2, 3), -1.0)
    batch.sampler_logprobs = batch.old_logprobs - math.log(2)
    logprobs = batch.old_logprobs + math.log(1.1)
    batch.reference_logprobs = logprobs - math.log(2)
    config = loss_settings(
        beta=0.1, kl_estimator="k1", kl_bias_correction=bias_correction, importance_correction="token_truncate"
    )
    loss, terms = grpo_loss(logprobs, batch, config, 2, 4)
    expected = (1.5 * -1.1 + 3 * 1.5 * 2.2 + 4 * 0.1 * math.log(2) * factor) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(terms.kl, torch.full((2, 3), factor * math.log(2)))


def test_with_the_samplers_logprobs_as_old_ones_the_ratio_is_to_the_sampler():
    """Their difference still shows, and a token that the sampler could not score counts as on policy."""
    batch = two_sequences()
    batch.sampler_logprobs = batch.old_logprobs = torch.tensor([[-1.0] * 3, [-1.0, math.nan, -1.0]])
    loss, terms = grpo_loss(torch.full((2, 3), -0.9), batch, loss_settings(old_logprobs="sampler"), 2, 4)
    moved = math.exp(0.1)
    torch.testing.assert_close(terms.ratio, torch.tensor([[moved] * 3, [moved, 1.0, moved]]))
    torch.testing.assert_close(terms.mismatch.difference, torch.tensor([[0.1, 0.0, 0.0], [0.1, 0.0, 0.1]]))
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_token_that_the_sampler_could_not_score_is_not_corrected(mode):
    mask = torch.tensor([[True, True]])
    found = sampler_mismatch(torch.tensor([[-1.0, -1.0]]), torch.tensor([[math.nan, -1.0]]), mask, mode, 3.0)
    assert found.weights.unique().tolist() == [1.0] and found.difference.tolist() == [[0.0, 0.0]]


def test_token_shares_of_a_step_in_several_micro_batches():
    """2 of 8 completions, with 1 and 3 of the step's 20 tokens."""
    mask = two_sequences().completion_mask
    shares = {loss_type: token_share(mask, loss_type, 8, 20, 12).flatten().tolist() for loss_type in LOSS_TYPES}
    assert shares == {
        "grpo": pytest.approx([1 / 8, 1 / 24]),
        "dapo": pytest.approx([1 / 20, 1 / 20]),
        "cispo": pytest.approx([1 / 20, 1 / 20]),
        "bnpo": pytest.approx([1 / 20, 1 / 20]),
        "dr_grpo": pytest.approx([1 / 96, 1 / 96]),
    }


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any parameter's gradient, by the norm."""
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - theirs[n]).norm() / theirs[n].norm()).item() for n in theirs)


def step_in_parts(model, samples, advantages, max_tokens, tokenizer, config):
    """One step as the training loop goes through it: loss, gradients, and the columns of metrics.csv."""
    model.zero_grad()
    means, tokens = Means(), sum(len(s.completion.token_ids) for s in samples)
    for part in micro_batches(samples, advantages, max_tokens, tokenizer.pad_token_id, CPU):
        learns = config.beta > 0 or bool(part.advantages.any())  # as in the loop
        with torch.set_grad_enabled(learns):
            logprobs, entropy = sequence_logprobs(model, part, 0.8)
        if config.beta:
            part.old_logprobs = (logprobs.detach() + 0.1 * part.completion_mask) * part.completion_mask
            part.reference_logprobs = part.old_logprobs
        loss, terms = grpo_loss(logprobs, part, config, len(samples), tokens)
        if learns:
            loss.backward()
        means.add(part, entropy, loss, terms)
    return gradients(model), means.columns(config)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_gradient_whatever_the_micro_batches(model, tokenizer, samples, loss_type, level):
    config = loss_settings(
        loss_type=loss_type, importance_level=level, beta=0.04, importance_correction="token_truncate"
    )
    ones, *parts = [
        step_in_parts(model, samples, ADVANTAGES.flatten(), max_tokens, tokenizer, config)
        for max_tokens in (10**6, 1, 60, 150)
    ]
    for grads, columns in parts:
        assert columns == pytest.approx(ones[1], rel=1e-4, abs=1e-6)
        assert largest_difference(grads, ones[0]) < 1e-5


def test_groups_without_advantage_need_no_backward_and_change_no_gradient(model, tokenizer, samples):
    """The second of three groups is worth the same throughout. Its tokens count in the mean and in the metrics."""
    config = loss_settings()
    batches = micro_batches(samples, ADVANTAGES.flatten(), 10**6, tokenizer.pad_token_id, CPU)
    assert [bool(part.advantages.any()) for part in batches] == [True, False]
    grads, columns = step_in_parts(model, samples, ADVANTAGES.flatten(), 10**6, tokenizer, config)

    model.zero_grad()
    batch = collate(samples, ADVANTAGES.flatten(), tokenizer.pad_token_id, CPU)
    logprobs, entropy = sequence_logprobs(model, batch, 0.8)
    loss, _ = grpo_loss(logprobs, batch, config, 12, int(batch.completion_mask.sum()))
    loss.backward()
    assert largest_difference(grads, gradients(model)) < 1e-5
    assert columns["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert columns["entropy"] == pytest.approx(entropy[batch.completion_mask].mean().item(), rel=1e-5)


def test_micro_batches_hold_every_sample_once_and_no_more_tokens_than_asked(samples, tokenizer):
    for max_tokens in (1, 60, 150, 10**6):
        seen = []
        for part in micro_batches(samples, torch.arange(12.0), max_tokens, tokenizer.pad_token_id, CPU):
            assert part.input_ids.numel() <= max_tokens or len(part.input_ids) == 1
            seen += part.advantages.tolist()
            for row, mask, advantage in zip(part.input_ids, part.completion_mask, part.advantages, strict=True):
                assert row[1:][mask].tolist() == samples[int(advantage)].completion.token_ids
        assert sorted(seen) == list(range(12))


def test_trl_gets_as_many_sequences_as_surely_fit():
    """64 sequences of at most 800 tokens: 5 fit into 4,096, and 4 divides 64."""
    from scripts.trl_grpo.train import sequences_per_micro_batch

    assert sequences_per_micro_batch(64, 800, 4096) == 4
    assert sequences_per_micro_batch(64, 800, 10**6) == 64
    assert sequences_per_micro_batch(64, 800, 100) == 1


# Parity: against the installed TRL, the same rollouts through its own code


@pytest.fixture(scope="module")
def parity_table(request):
    """Largest relative difference of gradients, loss type x setting; printed when all are in."""
    table = defaultdict(lambda: defaultdict(list))
    yield table
    largest = pd.DataFrame({row: {name: max(found) for name, found in cells.items()} for row, cells in table.items()})
    lines = ["", "Gradients against TRL's: largest relative difference over the five corrections for the sampler"]
    lines.append(largest.to_string(float_format="{:.1e}".format))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines))


@pytest.fixture(scope="module")
def trainer(demo_settings, demo_model, tokenizer):
    """TRL's trainer as scripts.trl_grpo makes it, with a reference model; one micro-batch holds all twelve samples.

    The tests set its options where TRL keeps them once it is made: as attributes. It takes seconds to import.
    """
    from scripts.trl_grpo.train import ObservedGRPOTrainer, Rewards, trl_config

    grpo_section = demo_settings["grpo"] | {
        "prompts_per_step": 3, "group_size": GROUP_SIZE, "max_tokens_per_micro_batch": 10**6, "temperature": 0.8,
        "max_completion_tokens": MAX_TOKENS, "beta": 0.04,
    }  # fmt: skip
    run = {**project_settings.run_settings(demo_settings, "trl"), "grpo": grpo_section}
    trainer = ObservedGRPOTrainer(
        model=str(demo_model),
        args=trl_config(run, 256, demo_model.parent / "trl"),
        train_dataset=Dataset.from_list([{"id": "0", "prompt": messages("1 + 1", ""), "gold": "2"}]),
        processing_class=tokenizer,
        clock=Clock(),
        metrics=demo_model.parent / "metrics.csv",
        rewards=Rewards([tokenizer.eos_token_id]),
    )
    assert trainer.args.per_device_train_batch_size == 12
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def tell(trainer, config: SimpleNamespace, scale_rewards: str = "group") -> None:
    """Our settings under TRL's names. It looks at the sampler's log-probs only with vLLM, so it is told it has it."""
    trainer.loss_type, trainer.importance_sampling_level = config.loss_type, config.importance_level
    trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta = config.epsilon, config.epsilon_high, config.delta
    trainer.beta, trainer.args.use_bias_correction_kl = config.beta, config.kl_bias_correction
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = config.importance_correction != "none"
    trainer.vllm_importance_sampling_mode = config.importance_correction
    trainer.vllm_importance_sampling_clip_max = config.importance_cap
    trainer.scale_rewards = scale_rewards


def trl_inputs(trainer, monkeypatch, samples: list[Sample], batch: Batch) -> dict[str, torch.Tensor]:
    """What TRL makes of our samples: it pads them, scores old and reference log-probs, ratios and advantages."""
    sampler = [row[mask].tolist() for row, mask in zip(batch.sampler_logprobs, batch.completion_mask, strict=True)]
    completions = [s.completion.token_ids for s in samples]
    generated = ([s.prompt_ids for s in samples], completions, None, [None] * len(samples), sampler, {}, None, None)
    monkeypatch.setattr(trainer, "_generate", lambda prompts: generated)
    parts = torch.stack([(REWARDS > 0.5).float(), (REWARDS % 1 > 0.05).float()], dim=-1)  # (P, G, 2): 1.0 and 0.1 each
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *args: parts.view(-1, 2))
    rows = [{"prompt": messages(s.question["question"], ""), "gold": s.question["gold"]} for s in samples]
    trainer._metrics["train"].clear()
    return trainer._generate_and_score_completions(rows)


def trl_logprobs(trainer, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """TRL's log-probs of its (B, C) completion tokens."""
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].shape[1],
        )[0]


def in_our_shape(values: torch.Tensor, inputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """TRL's (B, C) values of completion tokens as our (B, T)."""
    ours = torch.zeros(batch.completion_mask.shape)
    return ours.masked_scatter(batch.completion_mask, values[inputs["completion_mask"].bool()])


def ours(model, batch: Batch, config):
    """Loss, gradients and metrics of our implementation, as the training loop puts its parts together."""
    model.zero_grad()
    logprobs, entropy = sequence_logprobs(model, batch, 0.8)
    loss, terms = grpo_loss(logprobs, batch, config, len(batch.advantages), int(batch.completion_mask.sum()))
    loss.backward()
    means = Means()
    means.add(batch, entropy, loss, terms)
    return loss.item(), gradients(model), means.columns(config)


def theirs(trainer, inputs: dict[str, torch.Tensor]):
    """The same of TRL; its metrics as our wrapper writes them into metrics.csv."""
    trainer.model.zero_grad()
    trainer.observed = type(trainer.observed)()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model), trainer.observed.columns()


POLICIES = {  # what the old policy was, and the bounds
    "on policy": {},
    "clipped": {"off": True},
    "two-sided": {"off": True, "delta": 1.4},
}
KLS = {
    "no KL": {},
    "KL k3": {"beta": 0.04},
    "KL uncorrected": {"beta": 0.04, "kl_bias_correction": False},
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_parity_of_loss_gradients_and_metrics(
    trainer, model, samples, batch, monkeypatch, parity_table, loss_type, level
):
    """Loss type x importance level x clip x KL x correction for the sampler: 45 settings in each of ten tests."""
    for mode in CORRECTIONS:
        config = loss_settings(loss_type=loss_type, importance_level=level, importance_correction=mode, beta=0.04)
        tell(trainer, config)
        inputs = trl_inputs(trainer, monkeypatch, samples, batch)
        torch.testing.assert_close(batch.advantages, inputs["advantages"], atol=1e-4, rtol=1e-5)
        inputs["advantages"] = batch.advantages  # rounding that TRL leaves in a group of equal rewards: tested above
        # A reference that has moved away from the policy; at the start model every KL would be 0.
        inputs["ref_per_token_logps"] += 0.3 * noise(inputs["ref_per_token_logps"], 2)
        logprobs = trl_logprobs(trainer, inputs)
        drifted = logprobs + 0.3 * noise(logprobs, 3) + 0.5 * noise(logprobs[:, :1], 4)  # tokens, and whole sequences
        for policy, bounds in POLICIES.items():
            for kl, penalty in KLS.items():
                config = loss_settings(
                    loss_type=loss_type, importance_level=level, importance_correction=mode, **penalty,
                    delta=bounds.get("delta"), epsilon_high=1.1 if loss_type == "cispo" else 0.28,
                )  # fmt: skip
                tell(trainer, config)
                old, part = logprobs, dataclasses.replace(batch)
                if bounds:  # the policy has moved on since; the sampler was where the old policy was
                    old = drifted
                    part.old_logprobs = in_our_shape(old, inputs, batch)
                    part.sampler_logprobs = batch.sampler_logprobs + in_our_shape(old - logprobs, inputs, batch)
                if config.beta:
                    part.reference_logprobs = in_our_shape(inputs["ref_per_token_logps"], inputs, batch)
                our_loss, our_gradients, our_metrics = ours(model, part, config)
                their_loss, their_gradients, their_metrics = theirs(trainer, {**inputs, "old_per_token_logps": old})

                setting = f"{policy}, {kl}, {mode}"
                difference = largest_difference(our_gradients, their_gradients)
                parity_table[f"{loss_type}, {level}"][f"{policy}, {kl}"].append(difference)
                assert difference < 1e-5, setting
                assert our_loss == pytest.approx(their_loss, rel=1e-5, abs=2e-7), setting
                assert our_metrics["entropy"] == pytest.approx(their_metrics["entropy"], rel=1e-5), setting
                assert our_metrics["clip_fraction"] == pytest.approx(their_metrics["clip_fraction"], abs=1e-6), setting
                assert (our_metrics["clip_fraction"] > 0.02) == bool(bounds), setting
                if config.beta:
                    assert our_metrics["kl"] == pytest.approx(their_metrics["kl"], rel=1e-5), setting


def in_trls_shape(weights: torch.Tensor, inputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """Our (B, T) weights as TRL's (B, C); those of sequences, (B, 1), are the same in both."""
    if weights.shape[1] == 1:
        return weights
    mask = inputs["completion_mask"].bool()
    return torch.ones(mask.shape).masked_scatter(mask, weights[batch.completion_mask])


@pytest.mark.parametrize("mode", CORRECTIONS[1:])
def test_parity_of_the_correction_for_the_sampler(trainer, model, samples, batch, monkeypatch, mode):
    tell(trainer, loss_settings(importance_correction=mode))
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    measured = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    config = loss_settings(importance_correction=mode)
    _, _, columns = ours(model, batch, config)
    with torch.no_grad():
        logprobs, _ = sequence_logprobs(model, batch, 0.8)
    mismatch = sampler_mismatch(logprobs, batch.sampler_logprobs, batch.completion_mask, mode, CAP)
    weights = in_trls_shape(mismatch.weights, inputs, batch)
    close = 5e-5  # the rounding of 24 tokens adds up in the ratio of a sequence
    torch.testing.assert_close(weights, inputs["importance_sampling_ratio"], atol=0, rtol=close)
    assert (weights == (CAP if mode.endswith("truncate") else 0)).any(), "no ratio is above the cap"
    logged = measured["sampling/importance_sampling_ratio/mean"]
    if mode.startswith("sequence"):  # TRL counts the empty completion, of weight 1
        logged = (12 * logged - 1) / 11
    assert columns["correction_mean"] == pytest.approx(logged, rel=close)
    assert columns["logprob_difference"] == pytest.approx(measured["sampling/sampling_logp_difference/mean"], rel=1e-5)
    # the raw values are the same in both runs' metrics, since TRL logs them after the cap only
    of_sampler = ["logprob_difference", "kl_sampler", "sampler_ratio_max", "correction_mean", "corrected_share"]
    raw = {name: columns[name] for name in of_sampler}
    assert {name: observed(trainer, inputs)[name] for name in of_sampler} == pytest.approx(raw, rel=1e-4)
    assert raw["sampler_ratio_max"] > CAP and 0 < raw["corrected_share"] < 1


def observed(trainer, *micro_batches: dict[str, torch.Tensor]) -> dict[str, float]:
    """The columns that our wrapper takes from TRL's steps."""
    trainer.observed = type(trainer.observed)()
    for inputs in micro_batches:
        trainer._compute_loss(trainer.model, inputs)
    return trainer.observed.columns()


def test_parity_of_the_samplers_difference_where_nothing_is_corrected(trainer, model, samples, batch, monkeypatch):
    """TRL says nothing about the sampler then; the run that shows what a missing correction does needs the curve."""
    config = loss_settings()
    tell(trainer, config)
    monkeypatch.setattr(trainer, "use_vllm", True)
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    assert "importance_sampling_ratio" not in inputs
    found, (_, _, columns) = observed(trainer, inputs), ours(model, batch, config)
    for name in ("logprob_difference", "kl_sampler", "sampler_ratio_max"):
        assert found[name] == pytest.approx(columns[name], rel=1e-4)
    assert "correction_mean" not in found


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_parity_of_advantages(trainer, samples, batch, monkeypatch, scale):
    tell(trainer, loss_settings(), scale)
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    assert trainer._metrics["train"]["reward"][-1] == pytest.approx(REWARDS.mean().item(), rel=1e-6)
    torch.testing.assert_close(group_advantages(REWARDS, scale).flatten(), inputs["advantages"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_parity_with_truncated_completions_left_out(
    trainer, model, samples, batch, tokenizer, monkeypatch, loss_type, level
):
    """TRL masks them; we leave them out of the micro-batches. They keep their share of what the mean divides by."""
    config = loss_settings(loss_type=loss_type, importance_level=level)
    tell(trainer, config)
    monkeypatch.setattr(trainer, "mask_truncated_completions", True)
    # TRL looks at the last token, and an empty completion has none
    samples = [s if s.completion.token_ids else sample(s.prompt_ids, [tokenizer.eos_token_id]) for s in samples]
    inputs = trl_inputs(trainer, monkeypatch, samples, collate(samples, batch.advantages, 0, CPU))
    inputs["advantages"] = batch.advantages
    their_loss, their_gradients, _ = theirs(trainer, inputs)

    kept = [i for i, s in enumerate(samples) if not s.completion.truncated]
    assert len(kept) == 9
    model.zero_grad()
    part = collate([samples[i] for i in kept], batch.advantages[kept], tokenizer.pad_token_id, CPU)
    logprobs, _ = sequence_logprobs(model, part, 0.8)
    loss, _ = grpo_loss(logprobs, part, config, len(samples), int(part.completion_mask.sum()))
    loss.backward()
    assert loss.item() == pytest.approx(their_loss, rel=1e-5, abs=2e-7)
    assert largest_difference(gradients(model), their_gradients) < 1e-5


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_parity_across_accumulation_but_for_bnpo(trainer, model, samples, batch, monkeypatch, loss_type):
    """TRL's bnpo averages each micro-batch by itself, so its gradient depends on how a step is cut; ours does not."""
    config = loss_settings(loss_type=loss_type)
    tell(trainer, config)
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 3)
    monkeypatch.setattr(trainer.args, "steps_per_generation", 3)
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    inputs["advantages"] = batch.advantages
    trainer.model.zero_grad()
    trainer.observed = type(trainer.observed)()
    for rows in torch.tensor([[0, 4, 8, 1], [5, 9, 2, 6], [10, 3, 7, 11]]):  # of unlike lengths
        part = {k: v[rows] if v.dim() else v for k, v in inputs.items()}
        trainer._compute_loss(trainer.model, part).backward()
    _, our_gradients, our_metrics = ours(model, batch, config)
    found = trainer.observed.columns()
    # means over all tokens, where TRL itself logs means of the micro-batches' means
    assert found["entropy"] == pytest.approx(our_metrics["entropy"], rel=1e-5)
    logged = trainer._metrics["train"]["entropy"]
    assert sum(logged) / len(logged) != pytest.approx(our_metrics["entropy"], rel=1e-3)
    difference = largest_difference(our_gradients, gradients(trainer.model))
    if loss_type == "bnpo":
        assert difference > 0.1
    else:
        assert difference < 1e-5
