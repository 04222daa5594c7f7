"""The mathematics of GRPO: against values worked out by hand, against naive formulas, and against TRL's trainer."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import settings as project_settings
from scripts.grpo_scratch.grpo import (
    Batch,
    collate,
    group_advantages,
    grpo_loss,
    importance_weights,
    kl_estimate,
    sequence_logprobs,
    token_share,
)
from scripts.grpo_scratch.rollout import Completion, Sample
from scripts.grpo_scratch.train import Means, micro_batches
from scripts.prepared import read_rows
from scripts.prompts import messages, prompt_text
from scripts.run_record import Clock
from scripts.trl_grpo.train import ClockedGRPOTrainer, correctness_reward, format_reward, trl_config

CPU = torch.device("cpu")
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
CORRECTIONS = ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
GROUP_SIZE = 4
MAX_TOKENS = 12
CAP = 1.5  # of the importance correction; low, so that some ratios are above it


def sample(prompt: list[int], completion: list[int], logprobs: list[float] | None = None, truncated=False) -> Sample:
    logprobs = [-0.5] * len(completion) if logprobs is None else logprobs
    return Sample({"id": "train-0"}, prompt, Completion(completion, logprobs, truncated), "")


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
    advantages = group_advantages(torch.tensor([[reward] * 8, [1.0, 0.0] * 4]), scale)
    # 0.1 has no exact binary form: its mean may be off in the last digit, and 1e-4 below keeps that small
    assert advantages[0].abs().max() < 1e-3
    assert advantages[1].abs().min() > 0.4


# Batches


def test_a_batch_aligns_masks_and_logprobs_with_predictions():
    samples = [sample([5, 6, 7], [8, 9], [-0.1, -0.2]), sample([5], [6, 7, 8, 2], [-1.0, -2.0, -3.0, -4.0])]
    batch = collate(samples, torch.tensor([0.5, -0.5]), 0, CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1]] * 2
    assert batch.completion_mask.tolist() == [[False, False, True, True], [True, True, True, True]]
    torch.testing.assert_close(batch.sampler_logprobs, torch.tensor([[0.0, 0.0, -0.1, -0.2], [-1.0, -2.0, -3.0, -4.0]]))
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_a_batch_pads_on_the_right():
    batch = collate([sample([5, 6], [7]), sample([5], [6, 7, 8, 9, 2])], torch.zeros(2), 1, CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 1, 1], [5, 6, 7, 8, 9, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert batch.completion_mask.tolist() == [[False, True, False, False, False], [True] * 5]


def test_the_pad_token_inside_a_completion_counts():
    """A model may sample the padding token; what counts is where it stands, not which it is."""
    batch = collate([sample([5], [0, 0, 2])], torch.zeros(1), 0, CPU)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1]]
    assert batch.completion_mask.tolist() == [[True, True, True]]


def test_an_empty_completion_counts_nothing_and_breaks_nothing(model):
    """No engine gives one (an end-of-sequence token is part of its completion), but the mathematics holds for it."""
    batch = collate([sample([5, 6], []), sample([5, 6], [7, 2])], torch.tensor([1.0, -1.0]), 0, CPU)
    assert batch.completion_mask.sum(1).tolist() == [0, 2]
    logprobs, entropy = sequence_logprobs(model, batch, 1.0)
    assert logprobs[0].tolist() == entropy[0].tolist() == [0.0, 0.0, 0.0]
    for loss_type in LOSS_TYPES:
        loss, _ = grpo_loss(logprobs, logprobs.detach(), batch, loss_settings(loss_type=loss_type), 2, 2, ones(batch))
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
    """Three groups of four: ragged, some cut at the length limit, one of a single token. Log-probs come later."""
    rng = random.Random(0)
    found = []
    for question in read_rows(demo_data / "train.jsonl")[:3]:
        prompt = tokenizer.encode(prompt_text(tokenizer, question["question"], ""), add_special_tokens=False)
        for length in (3, 8, MAX_TOKENS, 1):
            tokens = [rng.randrange(3, len(tokenizer)) for _ in range(length)]
            if length < MAX_TOKENS:
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


def ones(batch: Batch) -> torch.Tensor:
    return torch.ones(len(batch.advantages), 1)


def loss_settings(**changes) -> SimpleNamespace:
    defaults = {
        "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "loss_type": "dapo", "max_completion_tokens": MAX_TOKENS
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_a_softmax_over_all_logits(model, batch, temperature):
    logprobs, entropy = sequence_logprobs(model, batch, temperature)
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].double() / temperature
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


# KL and the correction for the sampler


def test_kl_estimate_of_known_values():
    policy, reference = torch.tensor([[-1.0, -1.0, -2.0]]), torch.tensor([[-1.0, -2.0, -1.0]])
    expected = [[0.0, math.exp(-1) + 1 - 1, math.exp(1) - 1 - 1]]
    torch.testing.assert_close(kl_estimate(policy, reference), torch.tensor(expected))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [[1.0], [1.0]]),
        ("token_truncate", [[2.0, 3.0, 1.0], [0.5, 0.5, 1.0]]),
        ("token_mask", [[2.0, 0.0, 1.0], [0.5, 0.5, 1.0]]),
        ("sequence_truncate", [[3.0], [0.25]]),
        ("sequence_mask", [[0.0], [0.25]]),
    ],
)
def test_importance_weights_of_known_ratios(mode, expected):
    """Ratios 2 and 4 in the first completion (8 as a whole), 1/2 and 1/2 in the second; the cap is 3."""
    ratios = torch.tensor([[2.0, 4.0, 9.0], [0.5, 0.5, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    batch = Batch(torch.zeros(2, 4), torch.ones(2, 4), mask, -1 - ratios.log(), torch.zeros(2))
    weights = importance_weights(policy, batch, mode, 3.0)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert not weights.requires_grad


# Step 4: the loss


def two_sequences() -> Batch:
    """Completions of 1 and 3 tokens with advantages 1 and -2."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    return Batch(torch.zeros(2, 4), torch.ones(2, 4), mask, torch.zeros(2, 3), torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # on policy a token's loss is -A: -1 once, 2 three times
        ("grpo", (-1 + 2) / 2),
        ("dapo", (-1 + 2 + 2 + 2) / 4),
        ("bnpo", (-1 + 2 + 2 + 2) / 4),
        ("dr_grpo", (-1 + 2 + 2 + 2) / (2 * 12)),
    ],
)
def test_loss_of_two_completions_on_policy(loss_type, expected):
    logprobs = torch.full((2, 3), -1.0)
    loss, clipped = grpo_loss(
        logprobs, logprobs, two_sequences(), loss_settings(loss_type=loss_type), 2, 4, torch.ones(2, 1)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert not clipped.any()


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
    ratios = torch.tensor([[1.5, 1.0, 1.0], [0.5, 1.5, 1.0]])
    old = torch.full((2, 3), -1.0)
    logprobs = (old + ratios.log()).requires_grad_()
    loss, clipped = grpo_loss(
        logprobs, old, two_sequences(), loss_settings(loss_type=loss_type), 2, 4, torch.ones(2, 1)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert clipped.tolist() == [[True, False, False], [True, False, False]]
    loss.backward()
    assert (logprobs.grad == 0).tolist() == [[True, True, True], [True, False, False]]


def test_loss_with_importance_weights_and_kl():
    """Importance weighs the policy's part, not the KL's; the KL is multiplied by the ratio."""
    old, kl = torch.full((2, 3), -1.0), torch.full((2, 3), 0.5)
    logprobs = old + torch.tensor([[1.1, 1.0, 1.0], [1.1, 1.1, 1.1]]).log()
    loss, _ = grpo_loss(logprobs, old, two_sequences(), loss_settings(beta=0.1), 2, 4, torch.tensor([[0.5], [2.0]]), kl)
    assert loss.item() == pytest.approx((0.5 * -1.1 + 3 * 2.0 * 2.2 + 4 * 0.1 * 0.5 * 1.1) / 4, rel=1e-6)


def test_token_shares_of_a_step_in_several_micro_batches():
    """2 of 8 completions, with 1 and 3 of the step's 20 tokens."""
    mask = two_sequences().completion_mask
    shares = {loss_type: token_share(mask, loss_type, 8, 20, 12).flatten().tolist() for loss_type in LOSS_TYPES}
    assert shares == {
        "grpo": pytest.approx([1 / 8, 1 / 24]),
        "dapo": pytest.approx([1 / 20, 1 / 20]),
        "bnpo": pytest.approx([1 / 20, 1 / 20]),
        "dr_grpo": pytest.approx([1 / 96, 1 / 96]),
    }


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any parameter's gradient, by the norm."""
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - theirs[n]).norm() / theirs[n].norm()).item() for n in theirs)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_gradient_whatever_the_micro_batch_size(model, tokenizer, samples, loss_type):
    """As the training loop goes through a step, with KL and correction; also its means for metrics.csv."""
    settings = loss_settings(loss_type=loss_type, beta=0.04, importance_correction="token_truncate")
    tokens = sum(len(s.completion.token_ids) for s in samples)
    found = []
    for size in (1, 3, 5, len(samples)):
        model.zero_grad()
        loss, means = 0.0, Means()
        for part in micro_batches(samples, ADVANTAGES.flatten(), size, tokenizer, CPU):
            logprobs, entropy = sequence_logprobs(model, part, 0.8)
            old = (logprobs.detach() + 0.1 * part.completion_mask) * part.completion_mask
            kl = kl_estimate(logprobs, old)
            weights = importance_weights(logprobs, part, "token_truncate", 2.0)
            part_loss, clipped = grpo_loss(logprobs, old, part, settings, len(samples), tokens, weights, kl)
            part_loss.backward()
            loss += part_loss.item()
            means.add(part, logprobs.detach(), old, entropy, clipped, weights, kl)
        found.append((loss, gradients(model), means.columns(settings)))
    whole_loss, whole_gradients, whole_means = found[-1]
    for loss, grads, columns in found[:-1]:
        assert loss == pytest.approx(whole_loss, abs=1e-6)
        assert columns == pytest.approx(whole_means, rel=1e-5)
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, whole_gradients[name], atol=1e-6, rtol=1e-4)


def test_every_sample_of_a_step_is_trained_on_once(samples, tokenizer):
    seen = []
    for part in micro_batches(samples, torch.arange(12.0), 5, tokenizer, CPU):
        seen += part.advantages.tolist()
        for row, mask, advantage in zip(part.input_ids, part.completion_mask, part.advantages, strict=True):
            assert row[1:][mask].tolist() == samples[int(advantage)].completion.token_ids
    assert sorted(seen) == list(range(12))


# Against the installed TRL: the same rollouts through its own code


def trl_trainer(settings, model_dir, tokenizer, **grpo):
    """The trainer of scripts.trl_grpo, made as it makes it; its gradient accumulation is one micro-batch of all."""
    settings["grpo"] |= {
        "prompts_per_step": 3, "group_size": GROUP_SIZE, "micro_batch_size": 3 * GROUP_SIZE, "temperature": 0.8,
        "max_completion_tokens": MAX_TOKENS, **grpo,
    }  # fmt: skip
    run = {**project_settings.run_settings(settings, "trl"), "grpo": settings["grpo"]}
    trainer = ClockedGRPOTrainer(
        model=str(model_dir),
        reward_funcs=[correctness_reward, format_reward],
        args=trl_config(run, 256, model_dir.parent / "trl"),
        train_dataset=Dataset.from_list([{"id": "0", "prompt": messages("1 + 1", ""), "gold": "2"}]),
        processing_class=tokenizer,
        clock=Clock(),
    )
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def trl_inputs(trainer, monkeypatch, samples: list[Sample], batch: Batch) -> dict[str, torch.Tensor]:
    """What TRL makes of our samples: it pads them, scores old and reference log-probs, ratios and advantages."""
    sampler = [row[mask].tolist() for row, mask in zip(batch.sampler_logprobs, batch.completion_mask, strict=True)]
    completions = [s.completion.token_ids for s in samples]
    generated = ([s.prompt_ids for s in samples], completions, None, [None] * len(samples), sampler, {}, None, None)
    monkeypatch.setattr(trainer, "_generate", lambda prompts: generated)
    parts = torch.stack([(REWARDS > 0.5).float(), (REWARDS % 1 > 0.05).float()], dim=-1)  # (P, G, 2): 1.0 and 0.1 each
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *args: parts.view(-1, 2))
    rows = [{"prompt": messages(s.question["question"], ""), "gold": s.question["gold"]} for s in samples]
    return trainer._generate_and_score_completions(rows)


def in_our_shape(values: torch.Tensor, inputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """TRL's (B, C) values of completion tokens as our (B, T)."""
    ours = torch.zeros(batch.completion_mask.shape)
    return ours.masked_scatter(batch.completion_mask, values[inputs["completion_mask"].bool()])


def ours(model, batch: Batch, settings, old: torch.Tensor | None, reference: torch.Tensor | None, mode: str = "none"):
    """Loss, gradients and metrics of our implementation, as the training loop puts its parts together."""
    model.zero_grad()
    logprobs, entropy = sequence_logprobs(model, batch, 0.8)
    old = logprobs.detach() if old is None else old
    kl = None if reference is None else kl_estimate(logprobs, reference)
    weights = importance_weights(logprobs, batch, mode, CAP)
    tokens = int(batch.completion_mask.sum())
    loss, clipped = grpo_loss(logprobs, old, batch, settings, len(batch.advantages), tokens, weights, kl)
    loss.backward()
    means = Means()
    means.add(batch, logprobs.detach(), old, entropy, clipped, weights, kl)
    return loss.item(), gradients(model), means.columns(SimpleNamespace(importance_correction=mode))


def theirs(trainer, inputs: dict[str, torch.Tensor]):
    """The same of TRL."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model), {k: v[-1] for k, v in trainer._metrics["train"].items()}


@pytest.mark.parametrize("policy", ["on policy", "clipped"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradients_are_trls(
    settings, model, demo_model, tokenizer, samples, batch, monkeypatch, loss_type, beta, policy
):
    trainer = trl_trainer(settings, demo_model, tokenizer, loss_type=loss_type, beta=beta)
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    torch.testing.assert_close(batch.advantages, inputs["advantages"], atol=0, rtol=1e-5)
    old = reference = None
    if beta:
        # A reference that has moved away from the policy; at the start model every KL would be 0.
        inputs["ref_per_token_logps"] += 0.3 * noise(inputs["ref_per_token_logps"], 2)
        reference = in_our_shape(inputs["ref_per_token_logps"], inputs, batch)
    if policy == "clipped":
        with torch.no_grad():
            per_token, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                inputs["completion_ids"].shape[1],
            )
        inputs["old_per_token_logps"] = per_token + 0.4 * noise(per_token, 3)
        old = in_our_shape(inputs["old_per_token_logps"], inputs, batch)

    config = loss_settings(loss_type=loss_type, beta=beta)
    our_loss, our_gradients, our_metrics = ours(model, batch, config, old, reference)
    their_loss, their_gradients, their_metrics = theirs(trainer, inputs)

    assert our_loss == pytest.approx(their_loss, rel=1e-5, abs=1e-7)
    assert largest_difference(our_gradients, their_gradients) < 1e-5
    assert our_metrics["entropy"] == pytest.approx(their_metrics["entropy"], rel=1e-5)
    assert our_metrics["clip_fraction"] == pytest.approx(their_metrics["clip_ratio/region_mean"], abs=1e-6)
    assert (0.1 < our_metrics["clip_fraction"] < 0.9) == (policy == "clipped")
    if beta:
        # TRL logs the KL as it stands in the loss, times the ratio; ours is the estimate itself
        assert our_metrics["kl"] > 0.01
        if policy == "on policy":
            assert our_metrics["kl"] == pytest.approx(their_metrics["kl"], rel=1e-4)


@pytest.mark.parametrize("mode", CORRECTIONS[1:])
def test_the_correction_for_the_sampler_is_trls(
    settings, model, demo_model, tokenizer, samples, batch, monkeypatch, mode
):
    """TRL's own code scores the sampler's log-probs; only for vLLM, so it is told that it samples with it."""
    trainer = trl_trainer(settings, demo_model, tokenizer)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode, trainer.vllm_importance_sampling_clip_max = mode, CAP
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    measured = trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"][-1]
    difference = trainer._metrics["train"]["sampling/sampling_logp_difference/mean"][-1]

    with torch.no_grad():
        logprobs, _ = sequence_logprobs(model, batch, 0.8)
    weights = importance_weights(logprobs, batch, mode, CAP)
    ratio = inputs["importance_sampling_ratio"]
    ratio = in_our_shape(ratio, inputs, batch) if mode.startswith("token") else ratio
    relevant = batch.completion_mask if mode.startswith("token") else torch.ones_like(weights, dtype=torch.bool)
    torch.testing.assert_close(weights[relevant], ratio[relevant], atol=0, rtol=1e-4)
    assert (weights[relevant] == (CAP if mode.endswith("truncate") else 0)).any(), "no ratio is above the cap"

    our_loss, our_gradients, our_metrics = ours(model, batch, loss_settings(), None, None, mode)
    their_loss, their_gradients, _ = theirs(trainer, inputs)
    assert our_loss == pytest.approx(their_loss, rel=1e-4)
    assert largest_difference(our_gradients, their_gradients) < 1e-4
    assert our_metrics["correction_mean"] == pytest.approx(measured, rel=1e-5)
    assert our_metrics["logprob_difference"] == pytest.approx(difference, rel=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(settings, demo_model, tokenizer, samples, batch, monkeypatch, scale):
    trainer = trl_trainer(settings, demo_model, tokenizer, scale_rewards=scale)
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    assert trainer._metrics["train"]["reward"][-1] == pytest.approx(REWARDS.mean().item(), rel=1e-6)
    torch.testing.assert_close(group_advantages(REWARDS, scale).flatten(), inputs["advantages"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_summed_over_micro_batches_are_trls_but_for_bnpo(
    settings, model, demo_model, tokenizer, samples, batch, monkeypatch, loss_type
):
    """TRL's bnpo averages each micro-batch by itself, so its gradient depends on how a step is cut; ours does not."""
    trainer = trl_trainer(settings, demo_model, tokenizer, loss_type=loss_type, micro_batch_size=4)
    assert trainer.current_gradient_accumulation_steps == 3
    inputs = trl_inputs(trainer, monkeypatch, samples, batch)
    trainer.model.zero_grad()
    for rows in torch.tensor([[0, 4, 8, 1], [5, 9, 2, 6], [10, 3, 7, 11]]):  # 17, 40 and 15 tokens
        part = {k: v[rows] if v.dim() else v for k, v in inputs.items()}
        trainer._compute_loss(trainer.model, part).backward()
    _, our_gradients, _ = ours(model, batch, loss_settings(loss_type=loss_type), None, None)
    difference = largest_difference(our_gradients, gradients(trainer.model))
    if loss_type == "bnpo":
        assert difference > 0.1
    else:
        assert difference < 1e-5
