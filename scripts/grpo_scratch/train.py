"""GRPO by hand. The loop in `train` is the method: sample, score, compare, update, push.

python -m scripts.grpo_scratch.train --run scratch --model models/demo --data data/demo --out results/scratch

The run's settings are those of config.yaml: the grpo section with the overrides of runs.<run>. It leaves metrics.csv (a
row a step), manifest.json (what was used) and the trained model in --out, and goes on from its last checkpoint if it
was stopped. The pipeline calls it so; by hand, prepare a model and questions first: snakemake models/demo/model.json
data/demo/data.json
"""

import copy
import gc
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, get_scheduler

from scripts import ranks
from scripts.checkpoints import Checkpoints
from scripts.cli import RunStopped, check_gpu, errors_for_people, run_arguments
from scripts.grpo_scratch.grpo import (
    ADVANTAGE_EPSILON,
    LOGITS_AT_ONCE,
    Batch,
    Terms,
    collate,
    degenerate,
    group_advantages,
    grpo_loss,
    micro_batches,
    sequence_logprobs,
)
from scripts.grpo_scratch.rewards import total_reward
from scripts.grpo_scratch.rollout import (
    Completion,
    Engine,
    Sample,
    Sampling,
    build_engine,
    rollout,
    sync_weights_to_vllm,
)
from scripts.lora import has_adapters, lora_config, trainable, whole
from scripts.memory import GIB, engine_sleeps, peak, predict, sizes
from scripts.prepared import ModelFilesError, read_rows, verify
from scripts.prompts import longest_sequence, prompt_text, within_context
from scripts.run_record import Clock, Following, RunRecord, WeightsMoved, prompts_digest, step_questions
from scripts.scoring import Scoring
from scripts.settings import namespace
from scripts.validation import Validation

if TYPE_CHECKING:
    from scripts.lora import Model


def train(
    settings: dict[str, Any], model_dir: Path, data_dir: Path, out: Path, tracking: str, checkpoint_every: int
) -> None:
    """Train the model in `model_dir` on the questions in `data_dir`; leave metrics, manifest and model in `out`."""
    check_gpu(settings, torch.cuda.is_available())
    run = namespace(settings)
    cfg, instruction = run.grpo, run.prompt.instruction
    sequences = cfg.prompts_per_step * cfg.group_size
    ranks.start(cfg.processes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cfg.seed)

    verify(model_dir)
    checkpoints = Checkpoints(settings, "scripts.grpo_scratch.train", model_dir, data_dir, checkpoint_every)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    questions = within_context(model_dir, tokenizer, read_rows(data_dir / "train.jsonl"), instruction)
    validation = Validation(data_dir, settings, tokenizer)
    longest = longest_sequence(
        model_dir, tokenizer, questions + validation.questions, instruction, cfg.max_completion_tokens
    )
    memory = predict(model_dir, cfg, run.engine.memory_gib, LOGITS_AT_ONCE)
    sleeps = engine_sleeps(run.engine, cfg, memory)
    engine = build_engine(model_dir, run.engine, longest, sequences // cfg.processes, cfg.precision, sleeps=sleeps)
    engine.sleep()
    model, reference = build_policy(model_dir, cfg, device)
    check_logprobs(model, tokenizer.encode(prompt_text(tokenizer, questions[0]["question"], instruction)), device)
    optimizer = torch.optim.AdamW(trainable(model), lr=cfg.learning_rate, weight_decay=0.0, fused=True)
    updates = cfg.updates_per_batch
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a first step without a gradient
    schedule = get_scheduler(cfg.lr_schedule, optimizer, cfg.warmup_steps * updates, cfg.steps * updates)
    # With checkpointing nobody reads autocast's bf16 copies of the weights again, so none are kept.
    autocast = torch.autocast(
        device.type, torch.bfloat16, enabled=cfg.precision == "bf16", cache_enabled=not cfg.gradient_checkpointing
    )

    resumed = checkpoints.newest()
    done = restore(resumed, model, optimizer, schedule) if resumed else 0
    largest = rehearse(model, optimizer, cfg, longest, autocast, device)
    if cfg.sync_every:
        sync_weights_to_vllm(model, engine)
    gc.collect()
    gc.freeze()  # what stands so far stays, so a rollout's many small objects need not have it looked through again
    record = RunRecord(out, settings, tracking, resumed)
    clock, scoring, moved, following = Clock(), Scoring(), WeightsMoved(model), Following()
    sampling = Sampling(cfg.group_size, cfg.max_completion_tokens, cfg.temperature, cfg.top_p, cfg.top_k)
    weights = settings["grpo"]["reward_weights"]
    draws = step_questions(len(questions), cfg.prompts_per_step, cfg.steps, cfg.seed)
    for step, draw in enumerate(draws[done:], start=done + 1):
        # 1. Sample: G completions of each of P questions, B = P x G sequences.
        with clock("rollout"):
            numbered = sampling._replace(seed=(cfg.seed << 32) + step)  # other random numbers in each step
            asked = [questions[i] for i in ranks.share(draw)]
            own = rollout(engine, tokenizer, asked, instruction, numbered)
            samples = ranks.gather(own)

        # 2. Score each completion, in plain Python.
        with clock("reward"):
            scores = ranks.gather([score(place, sample, weights, scoring) for place, sample in enumerate(own)])
            rewards = torch.tensor([earned["total"] for earned in scores]).view(-1, cfg.group_size)  # (P, G)
            bad_rewards = scoring.take(len(samples))

        # 3. Compare: how much better is each completion than its group?
        advantages = group_advantages(rewards, cfg.scale_rewards)  # (P, G)

        # 4. Update: forward, loss and backward micro-batch by micro-batch, then one step of the optimizer.
        with clock("train"):
            engine.sleep()  # where memory asks for it
            kept = [i for i, s in enumerate(samples) if not (cfg.mask_truncated_completions and s.completion.truncated)]
            tokens = sum(len(samples[i].completion.token_ids) for i in kept)
            mine = ranks.share(kept)
            batches = micro_batches(
                [samples[i] for i in mine],
                advantages.flatten()[mine],
                cfg.max_tokens_per_micro_batch,
                tokenizer.pad_token_id,
                device,
            )
            with autocast, torch.no_grad():
                for batch in batches:
                    batch.old_logprobs = old_logprobs(model, batch, cfg)
                    batch.reference_logprobs = reference_logprobs(model, reference, batch, cfg)
            means = Means()
            for _ in range(updates):
                for batch in batches:
                    # Without a KL, groups of equal rewards have no gradient.
                    learns = cfg.beta > 0 or bool(batch.advantages.any())
                    with autocast, torch.set_grad_enabled(learns):
                        logprobs, entropy = sequence_logprobs(model, batch, cfg.temperature)  # (B, T)
                    loss, terms = grpo_loss(logprobs, batch, cfg, sequences, tokens)
                    if learns:
                        loss.backward()
                    means.add(batch, entropy, loss, terms)
                learning_rate = schedule.get_last_lr()[0]
                moved.remember()
                grad_norm = update(model, optimizer, cfg.max_grad_norm, step)
                moved.compare()
                schedule.step()

        # 5. Push the new weights into the engine.
        with clock("push"):
            if cfg.sync_every and step % cfg.sync_every == 0:
                sync_weights_to_vllm(model, engine)

        measured = {"step": step, "grad_norm": grad_norm, "learning_rate": learning_rate, "bad_rewards": bad_rewards}
        measured |= {"skipped": int(grad_norm == 0), "weights_moved": moved.share}
        if validation.due(step):
            with clock.stopped():
                measured["validation_accuracy"] = validation.accuracy(engine)
        measured |= means.columns(cfg) | clock.take()
        log(record, cfg, samples, scores, rewards, advantages, measured)
        if cfg.sync_every == 1:
            following.check(step, measured.get("logprob_difference"))
        if checkpoints.due(step):
            with clock.stopped():
                checkpoints.save(step, state_of(step, model, optimizer, schedule), record.metrics)
        checkpoints.stop_here(step)

    values = used(cfg, sampling, autocast, model, optimizer, engine)
    measured = sizes(model, optimizer, reference) | largest | {"engine": engine.gib, "total": record.most_memory}
    ledger = {"predicted": memory | {"total": peak(memory, sleeps)}, "measured": measured}
    record.finish("scripts.grpo_scratch.train", values, {}, whole(model), tokenizer, model_dir, data_dir, ledger)
    checkpoints.remove()


def build_policy(model_dir: Path, cfg: Any, device: torch.device) -> tuple["Model", PreTrainedModel | None]:
    """The model that learns, and a copy that stays: the KL's reference, where one is asked for.

    With LoRA the model itself stays as it was, so it needs no copy.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[cfg.weights_dtype]).to(device)
    reference = copy.deepcopy(model) if cfg.beta > 0 and not cfg.lora_rank else None
    if cfg.weights_dtype == "bf16" and not cfg.lora_rank:
        warnings.warn(
            f"weights_dtype: bf16 rounds an update away where it is less than 1/256 of the weight; at learning rate "
            f"{cfg.learning_rate:g} most are. weights_moved in metrics.csv is the share that an update really changes",
            stacklevel=1,
        )
    if cfg.lora_rank:
        from peft import get_peft_model

        torch.manual_seed(cfg.seed)
        model = get_peft_model(model, lora_config(cfg.lora_rank, cfg.lora_alpha))
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
    return model, reference


def rehearse(
    model: "Model", optimizer: Any, cfg: Any, longest: int, autocast: torch.autocast, device: torch.device
) -> dict[str, float]:
    """On a GPU, take a micro-batch as large as a step can have forward and backward.

    Too little memory shows now instead of somewhere in the run.

    Returns:
        GiB that activations and that logits took, by torch's figures; nothing on a CPU.
    """
    if device.type != "cuda":
        return {}
    count = min(math.ceil(cfg.max_tokens_per_micro_batch / longest), cfg.prompts_per_step * cfg.group_size)
    length = longest if count == 1 else min(longest, cfg.max_tokens_per_micro_batch // count)
    completion = min(cfg.max_completion_tokens, length - 1)
    tokens = [0] * completion
    sample = Sample({}, [0] * (length - completion), Completion(tokens, [0.0] * completion, False), "")
    # AdamW's two moments come with the first step, and the second needs them beside everything else. Gradients that are
    # there already do not count as something else.
    moments = [] if optimizer.state else [torch.empty_like(p) for p in trainable(model) for _ in range(2)]
    for parameter in trainable(model):
        parameter.grad = torch.zeros_like(parameter)
    batch = collate([sample] * count, torch.ones(count), 0, device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with autocast:
        logprobs, _ = sequence_logprobs(model, batch, cfg.temperature)
    kept = torch.cuda.memory_allocated()
    logprobs.sum().backward()
    most = torch.cuda.max_memory_allocated()
    optimizer.zero_grad()
    del moments
    return {"activations": (kept - before) / GIB, "logits": (most - kept) / GIB}


def state_of(step: int, model: "Model", optimizer: Any, schedule: Any) -> dict[str, Any]:
    """All that the steps to come depend on; which questions they draw follows from their number."""
    return {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore(checkpoint: Path, model: "Model", optimizer: Any, schedule: Any) -> int:
    """Put everything back to where `state_of` saw it; returns the steps done."""
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random_cuda"])
    return state["step"]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@torch.no_grad()
def check_logprobs(model: "Model", tokens: list[int], device: torch.device) -> None:
    """Compare log-probs as training takes them with the model's own, on one text.

    Raises:
        ModelFilesError: they differ, for the architecture scales or caps its logits, or drops out at random.
    """
    sample = Sample({}, tokens[:1], Completion(tokens[1:], [0.0] * (len(tokens) - 1), False), "")
    ours, _ = sequence_logprobs(model, collate([sample], torch.zeros(1), 0, device), 1.0)  # (1, T)
    training = model.training
    logits = model.eval()(torch.tensor([tokens], device=device)).logits[0, :-1].float()  # (T, V)
    model.train(training)
    theirs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:], device=device)[:, None]).squeeze(-1)
    difference = (ours[0] - theirs).abs().max().item()
    if difference > (1e-2 if model.dtype == torch.float32 else 0.5):
        raise ModelFilesError(
            f"{model.config.model_type}: log-probs from hidden states and head differ from the model's own by "
            f"{difference:.3g} nats. It scales or caps its logits, or has dropout; the hand-written loop takes models "
            "that do neither (Llama, Qwen, Mistral, ...)"
        )


def update(model: "Model", optimizer: torch.optim.Optimizer, max_grad_norm: float, step: int) -> float:
    """One step of the optimizer with the gradient cut to `max_grad_norm`; returns the gradient's norm before that.

    Processes that train together take the same step, by the sum of their gradients.

    Without any gradient the weights stay: AdamW's momentum would move them all the same, as it does in TRL.

    Raises:
        RunStopped: the gradient is not finite; the weights are still those of the step before.
    """
    ranks.add_up_gradients(trainable(model))
    norm = torch.nn.utils.clip_grad_norm_(trainable(model), max_grad_norm).item()
    if not math.isfinite(norm):
        raise RunStopped(f"step {step}: the gradient is {norm}; lower learning_rate, or set precision: fp32")
    if norm > 0:
        optimizer.step()
    optimizer.zero_grad()
    return norm


def score(place: int, sample: Sample, weights: dict[str, float], scoring: Scoring) -> dict[str, Any]:
    """What a sample earns, or nothing where its reward fails; see `total_reward`."""
    truncated = sample.completion.truncated
    return scoring.checked(
        place,
        sample.question["id"],
        lambda: total_reward(sample.text, sample.question["gold"], truncated, weights),
        nothing={"total": 0.0, "correct": 0.0, "format": 0.0, "truncated": truncated},
    )


def old_logprobs(model: "Model", batch: Batch, cfg: Any) -> torch.Tensor | None:
    """(B, T) log-probs of the policy that the batch was drawn from, or None: those of the first forward pass."""
    if cfg.old_logprobs == "recompute":
        return sequence_logprobs(model, batch, cfg.temperature)[0]
    return batch.sampler_logprobs if cfg.old_logprobs == "sampler" else None


def reference_logprobs(
    model: "Model", reference: PreTrainedModel | None, batch: Batch, cfg: Any
) -> torch.Tensor | None:
    """(B, T) log-probs of the start model: of the copy, or of the model itself with its adapter off; None at beta 0."""
    if reference is not None:
        return sequence_logprobs(reference, batch, cfg.temperature)[0]
    if cfg.beta > 0 and has_adapters(model):
        with model.disable_adapter():
            return sequence_logprobs(model, batch, cfg.temperature)[0]
    return None


class Means:
    """Means over the completion tokens of a step, gathered micro-batch by micro-batch."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._losses: list[torch.Tensor] = []
        self._ratios: list[torch.Tensor] = []

    def add(self, batch: Batch, entropy: torch.Tensor, loss: torch.Tensor, terms: Terms) -> None:
        """Take in a micro-batch: its (B, T) entropy, its part of the loss, and what that was made of."""
        weights, ratio, difference, kl_sampler = terms.mismatch
        values = {
            "entropy": entropy,
            "clip_fraction": terms.clipped.float(),
            "ratio_mean": terms.ratio,
            "logprob_difference": difference,
            "kl_sampler": kl_sampler,
            "correction_mean": weights,
            "corrected_share": (weights != ratio).float(),
            "kl": terms.kl,
        }
        for name, value in values.items():
            if value is not None:
                mask = batch.completion_mask
                if value.shape != mask.shape:  # values of whole sequences, (B, 1), are averaged over sequences
                    mask = mask.any(1, keepdim=True)
                self._sums[name] = self._sums.get(name, 0) + (value * mask).sum()
                self._counts[name] = self._counts.get(name, 0) + mask.sum()
        self._losses.append(loss.detach())
        real = ratio if ratio.shape != batch.completion_mask.shape else ratio.masked_fill(~batch.completion_mask, 0.0)
        self._ratios.append(real.max())

    def columns(self, cfg: Any) -> dict[str, float]:
        """The columns of metrics.csv over all processes; without those that the settings leave without meaning."""
        sums = ranks.totals({name: total.item() for name, total in self._sums.items()})
        counts = ranks.totals({name: count.item() for name, count in self._counts.items()})
        loss = sum(ranks.gather([torch.stack(self._losses).sum().item() if self._losses else 0.0]))
        ratios = ranks.gather([ratio.item() for ratio in self._ratios])
        unused = {"correction_mean", "corrected_share"} if cfg.importance_correction == "none" else set()
        means = {name: sums[name] / max(count, 1) for name, count in counts.items() if name not in unused}
        largest = {"sampler_ratio_max": max(ratios)} if ratios else {}
        return {"loss": loss / cfg.updates_per_batch, **means, **largest}


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
    correct = sum(earned["correct"] for earned in scores) / len(scores)
    in_form = sum(earned["format"] for earned in scores) / len(scores)
    record.write(
        {
            "reward": rewards.mean().item(),
            "reward_correct": cfg.reward_weights.correct * correct,
            "reward_format": cfg.reward_weights.format * in_form,
            "accuracy": correct,
            "advantage_std": advantages.std().item(),
            "degenerate_groups": degenerate(rewards).float().mean().item(),
            "completion_length_mean": sum(lengths) / len(lengths),
            "completion_length_max": max(lengths),
            "truncated_share": sum(s.completion.truncated for s in samples) / len(samples),
            "tokens": sum(lengths),
            "prompts": prompts_digest([s.question["id"] for s in samples[:: cfg.group_size]]),
            **measured,
        }
    )


def used(
    cfg: Any,
    sampling: Sampling,
    autocast: torch.autocast,
    model: "Model",
    optimizer: torch.optim.Optimizer,
    engine: Engine,
) -> dict[str, Any]:
    """The values that this run really used, read off its objects where they keep them."""
    group = optimizer.param_groups[0]
    adapters = getattr(model, "peft_config", None)
    return {
        **vars(cfg),
        "reward_weights": vars(cfg.reward_weights),
        "processes": ranks.count(),
        "sequences_per_step": cfg.prompts_per_step * cfg.group_size,
        "learning_rate": group["initial_lr"],
        "optimizer": f"AdamW, betas {group['betas']}, eps {group['eps']}, weight decay {group['weight_decay']}",
        "advantage_epsilon": ADVANTAGE_EPSILON,
        "weights_dtype": next(name for name, dtype in DTYPES.items() if dtype == model.dtype),
        "precision": "bf16" if autocast._enabled or model.dtype == torch.bfloat16 else "fp32",
        "gradient_checkpointing": model.is_gradient_checkpointing,
        "group_size": sampling.n,
        "max_completion_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **({"lora_rank": adapters["default"].r, "lora_alpha": adapters["default"].lora_alpha} if adapters else {}),
        "sampler": engine.name,
    }


if __name__ == "__main__":
    with errors_for_people():
        args = run_arguments(__doc__)
        train(args.settings, args.model, args.data, args.out, args.tracking, args.checkpoint_every)
