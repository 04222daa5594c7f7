"""GRPO by hand. The loop in `train` is the method: sample, score, compare, update, push.

python -m scripts.grpo_scratch.train --run scratch --model models/demo --data data/demo --out results/scratch
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, get_scheduler

from scripts.cli import errors_for_people, run_arguments
from scripts.grpo_scratch.grpo import (
    ADVANTAGE_EPSILON,
    Batch,
    collate,
    group_advantages,
    grpo_loss,
    importance_weights,
    kl_estimate,
    sequence_logprobs,
)
from scripts.grpo_scratch.rewards import total_reward
from scripts.grpo_scratch.rollout import Engine, Sample, Sampling, build_engine, rollout, sync_weights_to_vllm
from scripts.prepared import read_rows, verify
from scripts.prompts import longest_sequence
from scripts.run_record import Clock, RunRecord, prompts_digest, step_questions
from scripts.settings import namespace
from scripts.validation import Validation


def train(settings: dict[str, Any], model_dir: Path, data_dir: Path, out: Path, tracking: str) -> None:
    """Train the model in `model_dir` on the questions in `data_dir`; leave metrics, manifest and model in `out`."""
    run = namespace(settings)
    cfg, instruction = run.grpo, run.prompt.instruction
    sequences = cfg.prompts_per_step * cfg.group_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cfg.seed)

    verify(model_dir)
    questions = read_rows(data_dir / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    validation = Validation(data_dir, settings, tokenizer)
    longest = longest_sequence(
        model_dir, tokenizer, questions + validation.questions, instruction, cfg.max_completion_tokens
    )
    engine = build_engine(model_dir, run.engine, longest, sequences, cfg.precision, cfg.seed)
    # The weights that learn stay fp32: at these learning rates bf16 would round almost every update away.
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device)
    reference = copy.deepcopy(model) if cfg.beta > 0 else None
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, weight_decay=0.0, fused=True)
    schedule = get_scheduler(cfg.lr_schedule, optimizer, cfg.warmup_steps, cfg.steps)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16")

    record, clock = RunRecord(out, settings, tracking), Clock()
    weights = settings["grpo"]["reward_weights"]
    sampling = Sampling(cfg.group_size, cfg.max_completion_tokens, cfg.temperature, cfg.top_p, cfg.top_k)
    draws = step_questions(len(questions), cfg.prompts_per_step, cfg.steps, cfg.seed)
    for step, draw in enumerate(draws, start=1):
        # 1. Sample: G completions of each of P questions, B = P x G sequences.
        with clock("rollout"):
            samples = rollout(engine, tokenizer, [questions[i] for i in draw], instruction, sampling)

        # 2. Score each completion, in plain Python.
        with clock("reward"):
            scores = [total_reward(s.text, s.question["gold"], s.completion.truncated, weights) for s in samples]
            rewards = torch.tensor([score["total"] for score in scores]).view(-1, cfg.group_size)  # (P, G)

        # 3. Compare: how much better is each completion than its group?
        advantages = group_advantages(rewards, cfg.scale_rewards)  # (P, G)

        # 4. Update: forward, loss and backward micro-batch by micro-batch, then one step of the optimizer.
        with clock("train"):
            tokens = sum(len(s.completion.token_ids) for s in samples)
            loss, means = 0.0, Means()
            for batch in micro_batches(samples, advantages.flatten(), cfg.micro_batch_size, tokenizer, device):
                with autocast:
                    logprobs, entropy = sequence_logprobs(model, batch, cfg.temperature)  # (B, T)
                    kl = None if reference is None else kl_to(reference, logprobs, batch, cfg.temperature)  # (B, T)
                # One update follows each batch, so the old policy is the one in hand and the ratio is exactly 1.
                old_logprobs = logprobs.detach()
                importance = importance_weights(logprobs, batch, cfg.importance_correction, cfg.importance_cap)
                part, clipped = grpo_loss(logprobs, old_logprobs, batch, cfg, sequences, tokens, importance, kl)
                part.backward()
                loss += part.item()
                means.add(batch, logprobs.detach(), old_logprobs, entropy, clipped, importance, kl)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item()
            learning_rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        # 5. Push the new weights into the engine.
        with clock("push"):
            if cfg.sync_every and step % cfg.sync_every == 0:
                sync_weights_to_vllm(model, engine)

        measured = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        if validation.due(step):
            with clock.stopped():
                measured["validation_accuracy"] = validation.accuracy(engine)
        log(record, cfg, samples, scores, rewards, advantages, {**measured, **means.columns(cfg), **clock.take()})

    values = used(cfg, model, optimizer, engine)
    record.finish("scripts.grpo_scratch.train", values, {}, model, tokenizer, model_dir, data_dir)


def micro_batches(
    samples: list[Sample], advantages: torch.Tensor, size: int, tokenizer: Any, device: torch.device
) -> Iterator[Batch]:
    """The step's samples with their advantages (B,) in batches of `size`, short ones together to save padding."""
    by_length = sorted(range(len(samples)), key=lambda i: len(samples[i].prompt_ids + samples[i].completion.token_ids))
    for start in range(0, len(samples), size):
        chosen = by_length[start : start + size]
        yield collate([samples[i] for i in chosen], advantages[chosen], tokenizer.pad_token_id, device)


def kl_to(reference: PreTrainedModel, logprobs: torch.Tensor, batch: Batch, temperature: float) -> torch.Tensor:
    """(B, T) KL estimate of the policy to `reference`, with gradient through the policy's `logprobs` only."""
    with torch.no_grad():
        reference_logprobs, _ = sequence_logprobs(reference, batch, temperature)
    return kl_estimate(logprobs, reference_logprobs)


class Means:
    """Means over the completion tokens of a step, gathered micro-batch by micro-batch."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(
        self,
        batch: Batch,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        entropy: torch.Tensor,
        clipped: torch.Tensor,
        importance: torch.Tensor,
        kl: torch.Tensor | None,
    ) -> None:
        """Take in a micro-batch; all tensors are (B, T), but importance weights of whole sequences are (B, 1)."""
        mask = batch.completion_mask
        self._take("entropy", entropy, mask)
        self._take("clip_fraction", clipped.float(), mask)
        self._take("ratio_mean", (logprobs - old_logprobs).exp(), mask)
        self._take("logprob_difference", (logprobs - batch.sampler_logprobs).abs(), mask)
        self._take(
            "correction_mean", importance, mask if importance.shape == mask.shape else torch.ones_like(importance)
        )
        if kl is not None:
            self._take("kl", kl.detach(), mask)

    def _take(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + values[mask.bool()].sum().item()
        self._counts[name] = self._counts.get(name, 0) + int(mask.sum())

    def columns(self, cfg: Any) -> dict[str, float]:
        """The columns of metrics.csv; without those that the settings leave without meaning."""
        unused = {"correction_mean"} if cfg.importance_correction == "none" else set()
        return {k: total / max(self._counts[k], 1) for k, total in self._sums.items() if k not in unused}


def log(
    record: RunRecord,
    cfg: Any,
    samples: list[Sample],
    scores: list[dict[str, Any]],
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    measured: dict[str, float],
) -> None:
    """Write the step's row of metrics and its line on the terminal.

    Args:
        rewards, advantages: (P, G).
        measured: columns that the loop has measured itself.
    """
    lengths = [len(s.completion.token_ids) for s in samples]
    correct = sum(score["correct"] for score in scores) / len(scores)
    in_form = sum(score["format"] for score in scores) / len(scores)
    record.write(
        {
            "reward": rewards.mean().item(),
            "reward_correct": cfg.reward_weights.correct * correct,
            "reward_format": cfg.reward_weights.format * in_form,
            "accuracy": correct,
            "advantage_std": advantages.std().item(),
            "degenerate_groups": (rewards.std(dim=1) == 0).float().mean().item(),
            "completion_length_mean": sum(lengths) / len(lengths),
            "completion_length_max": max(lengths),
            "truncated_share": sum(s.completion.truncated for s in samples) / len(samples),
            "tokens": sum(lengths),
            "prompts": prompts_digest([s.question["id"] for s in samples[:: cfg.group_size]]),
            **measured,
        }
    )


def used(cfg: Any, model: PreTrainedModel, optimizer: torch.optim.Optimizer, engine: Engine) -> dict[str, Any]:
    """The values that this run really used, read off its objects where they keep them."""
    group = optimizer.param_groups[0]
    return {
        **vars(cfg),
        "reward_weights": vars(cfg.reward_weights),
        "sequences_per_step": cfg.prompts_per_step * cfg.group_size,
        "learning_rate": group["initial_lr"],
        "optimizer": f"AdamW, betas {group['betas']}, eps {group['eps']}, weight decay {group['weight_decay']}",
        "advantage_epsilon": ADVANTAGE_EPSILON,
        "weights_dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "sampler": engine.name,
    }


if __name__ == "__main__":
    with errors_for_people():
        args = run_arguments(__doc__)
        train(args.settings, args.model, args.data, args.out, args.tracking)
