"""GRPO by hand. The loop in `train` is the method: sample, score, compare, update, push.

python -m scripts.grpo_scratch.train --run scratch --model models/demo --data data/demo --out results/scratch
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, get_scheduler

from scripts.cli import errors_for_people, run_arguments
from scripts.grpo_scratch.grpo import (
    ADVANTAGE_EPSILON,
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
from scripts.prompts import longest_prompt
from scripts.run_record import Clock, RunRecord, prompts_digest, step_questions
from scripts.settings import namespace


def train(settings: dict[str, Any], model_dir: Path, data_dir: Path, out: Path, tracking: str) -> None:
    """Train the model in `model_dir` on the questions in `data_dir`; leave metrics, manifest and model in `out`."""
    run = namespace(settings)
    cfg, instruction = run.grpo, run.prompt.instruction
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    verify(model_dir)
    questions = read_rows(data_dir / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    max_length = longest_prompt(tokenizer, questions, instruction) + cfg.max_completion_tokens
    sequences = cfg.prompts_per_step * cfg.group_size
    engine = build_engine(
        model_dir, run.engine.name, run.engine.memory_gib, max_length, sequences, cfg.precision, cfg.seed
    )
    # The weights that learn stay fp32: at these learning rates bf16 would round almost every update away.
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    reference = copy.deepcopy(model).eval() if cfg.beta > 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, weight_decay=0.0, fused=True)
    schedule = get_scheduler(cfg.lr_schedule, optimizer, cfg.warmup_steps, cfg.steps)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16")

    record = RunRecord(out, settings, tracking)
    clock = Clock()
    sampling = Sampling(cfg.group_size, cfg.max_completion_tokens, cfg.temperature, cfg.top_p, cfg.top_k)
    draws = step_questions(len(questions), cfg.prompts_per_step, cfg.steps, cfg.seed)
    for step, draw in enumerate(draws, start=1):
        drawn = [questions[i] for i in draw]

        # 1. Sample: G completions of each of P questions, B = P x G sequences.
        with clock("rollout"):
            samples = rollout(engine, tokenizer, drawn, instruction, sampling)

        # 2. Score each completion in plain Python.
        with clock("reward"):
            scores = [
                total_reward(s.text, s.question["gold"], s.completion.truncated, settings["grpo"]["reward_weights"])
                for s in samples
            ]

        # 3. Advantages: how much better each completion is than its group.
        rewards = torch.tensor([score["total"] for score in scores]).view(-1, cfg.group_size)  # (P, G)
        advantages = group_advantages(rewards, cfg.scale_rewards)  # (P, G)

        # 4. Forward, loss, backward, micro-batch by micro-batch, then one update.
        with clock("train"):
            stats = Stats()
            flat = advantages.flatten()  # (B,)
            tokens = sum(len(s.completion.token_ids) for s in samples)
            # Sequences of like length share a micro-batch, so that little of it is padding.
            by_length = sorted(
                range(sequences), key=lambda i: len(samples[i].prompt_ids + samples[i].completion.token_ids)
            )
            for start in range(0, sequences, cfg.micro_batch_size):
                chosen = by_length[start : start + cfg.micro_batch_size]
                batch = collate([samples[i] for i in chosen], flat[chosen], tokenizer.pad_token_id, device)
                with autocast:
                    logprobs, entropy = sequence_logprobs(model, batch, cfg.temperature)  # (B, T)
                    kl = None
                    if reference is not None:
                        with torch.no_grad():
                            reference_logprobs, _ = sequence_logprobs(reference, batch, cfg.temperature)
                        kl = kl_estimate(logprobs, reference_logprobs)
                # One update follows each batch, so the old policy is the one in hand and the ratio is exactly 1.
                old_logprobs = logprobs.detach()
                importance = importance_weights(logprobs, batch, cfg.importance_correction, cfg.importance_cap)
                loss, clipped = grpo_loss(logprobs, old_logprobs, batch, cfg, sequences, tokens, importance, kl)
                loss.backward()
                stats.add(loss, batch, logprobs, old_logprobs, entropy, kl, importance, clipped)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            learning_rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        # 5. Push the new weights into the engine.
        with clock("push"):
            if cfg.sync_every and step % cfg.sync_every == 0:
                sync_weights_to_vllm(model, engine)

        log(record, clock, cfg, step, samples, scores, rewards, advantages, stats, grad_norm.item(), learning_rate)

    record.finish(
        "scripts.grpo_scratch.train", used(cfg, model, optimizer, engine), model, tokenizer, model_dir, data_dir
    )


class Stats:
    """Sums over the completion tokens of a step, across its micro-batches."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.tokens = 0
        self._sums: dict[str, float] = {}

    def add(self, loss, batch, logprobs, old_logprobs, entropy, kl, importance, clipped) -> None:  # type: ignore[no-untyped-def]
        mask = batch.completion_mask
        self.loss += loss.item()
        self.tokens += int(mask.sum())
        values = {
            "entropy": entropy,
            "clip_fraction": clipped.float(),
            "ratio_mean": (logprobs.detach() - old_logprobs).exp(),
            "correction_mean": importance.expand(mask.shape),
            "logprob_difference": (logprobs.detach() - batch.sampler_logprobs).abs(),
            "kl": kl,
        }
        for name, value in values.items():
            if value is not None:
                self._sums[name] = self._sums.get(name, 0.0) + value.detach()[mask].sum().item()

    def means(self) -> dict[str, float]:
        return {name: total / max(self.tokens, 1) for name, total in self._sums.items()}


def log(
    record: RunRecord,
    clock: Clock,
    cfg: Any,
    step: int,
    samples: list[Sample],
    scores: list[dict[str, Any]],
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    stats: Stats,
    grad_norm: float,
    learning_rate: float,
) -> None:
    """Write the step's row of metrics and its line on the terminal."""  # fmt: skip
    lengths = [len(s.completion.token_ids) for s in samples]
    correct = sum(score["correct"] for score in scores) / len(scores)
    means = stats.means()
    if cfg.importance_correction == "none":
        del means["correction_mean"]
    record.write(
        {
            "step": step,
            "reward": rewards.mean().item(),
            "reward_correct": cfg.reward_weights.correct * correct,
            "reward_format": cfg.reward_weights.format * sum(score["format"] for score in scores) / len(scores),
            "accuracy": correct,
            "advantage_std": advantages.std().item(),
            "degenerate_groups": (rewards.std(dim=1) == 0).float().mean().item(),
            "completion_length_mean": sum(lengths) / len(lengths),
            "completion_length_max": max(lengths),
            "truncated_share": sum(s.completion.truncated for s in samples) / len(samples),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "loss": stats.loss,
            "tokens": sum(lengths),
            "prompts": prompts_digest([s.question["id"] for s in samples[:: cfg.group_size]]),
            **means,
            **clock.take(),
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
