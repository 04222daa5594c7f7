"""The same run with TRL's GRPOTrainer: the same prompts, rewards, schedule, precision and sequences a step.

python -m scripts.trl_grpo.train --run trl --model models/demo --data data/demo --out results/trl
"""

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from safetensors import SafetensorError
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from scripts import ranks
from scripts.checkpoints import KEPT, Checkpoints, say_unsaved, seal
from scripts.cli import check_gpu, errors_for_people, run_arguments
from scripts.grpo_scratch.rewards import correctness_reward as score_correct
from scripts.grpo_scratch.rewards import format_reward as score_format
from scripts.grpo_scratch.rollout import (
    Completion,
    Sampling,
    engine_start_for_people,
    stop_token_ids,
    transformers_generate,
    vllm_generate,
)
from scripts.lora import lora_config, whole
from scripts.memory import engine_sleeps, peak, predict, share_of_device, sizes
from scripts.prepared import read_rows, verify
from scripts.prompts import TEMPLATE_OPTIONS, longest_sequence, messages, within_context
from scripts.run_record import Clock, Following, RunRecord, WeightsMoved, prompts_digest, step_questions
from scripts.scoring import Scoring
from scripts.settings import namespace
from scripts.validation import Validation


class Rewards:
    """The one grader under TRL's calling convention; the methods' names are the metrics' names.

    Args:
        stop: tokens that end a completion; one that ends in no such token was cut.
    """

    def __init__(self, stop: list[int]) -> None:
        self._stop = stop
        self.scoring = Scoring()

    def correctness_reward(
        self, completions: list[Any], completion_ids: list[list[int]], gold: list[str], id: list[str], **_: Any
    ) -> list[float]:
        """1.0 where the completion answers the gold, else 0.0."""
        rewards = []
        for place, (text, ids, answer) in enumerate(zip(completions, completion_ids, gold, strict=True)):
            truncated = not ids or ids[-1] not in self._stop
            reward = partial(score_correct, text, answer, truncated)
            rewards.append(self.scoring.checked(place, id[place], reward, nothing=0.0))
        return rewards

    def format_reward(self, completions: list[Any], id: list[str], **_: Any) -> list[float]:
        """1.0 for exactly one final "#### number" line, else 0.0."""
        return [
            self.scoring.checked(place, id[place], partial(score_format, text), nothing=0.0)
            for place, text in enumerate(completions)
        ]


def sequences_per_micro_batch(sequences: int, longest: int, max_tokens: int) -> int:
    """TRL counts sequences where we count tokens: the most that surely fit, of those that divide a process's share."""
    fitting = [n for n in range(1, sequences + 1) if sequences % n == 0 and n * longest <= max_tokens]
    return max(fitting, default=1)


def trl_config(settings: dict[str, Any], max_length: int, out: Path) -> GRPOConfig:
    """config.yaml's names -> TRL's. What is not named here is at TRL's default."""
    run = namespace(settings)
    cfg = run.grpo
    sequences = cfg.prompts_per_step * cfg.group_size // cfg.processes
    micro_batch = sequences_per_micro_batch(sequences, max_length, cfg.max_tokens_per_micro_batch)
    on_gpu = torch.cuda.is_available()
    use_vllm = on_gpu and run.engine.name != "transformers" and importlib.util.find_spec("vllm") is not None
    engine: dict[str, Any] = {"use_vllm": False}
    if use_vllm:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": share_of_device(run.engine.memory_gib),
            "vllm_max_model_length": max_length,
            "vllm_importance_sampling_correction": cfg.importance_correction != "none",
        }
        if cfg.importance_correction != "none":
            engine["vllm_importance_sampling_mode"] = cfg.importance_correction
    config = GRPOConfig(
        output_dir=str(out),
        max_steps=cfg.steps * cfg.updates_per_batch,  # counts updates
        per_device_train_batch_size=micro_batch,  # counts sequences, not prompts
        gradient_accumulation_steps=sequences // micro_batch,
        num_iterations=cfg.updates_per_batch,
        num_generations=cfg.group_size,
        max_completion_length=cfg.max_completion_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        chat_template_kwargs=TEMPLATE_OPTIONS,
        learning_rate=cfg.learning_rate,
        lr_scheduler_type=cfg.lr_schedule,
        warmup_steps=cfg.warmup_steps * cfg.updates_per_batch,
        max_grad_norm=cfg.max_grad_norm,
        weight_decay=0.0,
        epsilon=cfg.epsilon,
        epsilon_high=cfg.epsilon_high,
        delta=cfg.delta,
        beta=cfg.beta,
        use_bias_correction_kl=cfg.kl_bias_correction,
        importance_sampling_level=cfg.importance_level,
        mask_truncated_completions=cfg.mask_truncated_completions,
        loss_type=cfg.loss_type,
        scale_rewards=cfg.scale_rewards,
        vllm_importance_sampling_clip_max=cfg.importance_cap,
        reward_weights=[cfg.reward_weights.correct, cfg.reward_weights.format],
        # The dtype of the weights that learn; on one GPU, whatever others are visible.
        model_init_kwargs={"dtype": DTYPES[cfg.weights_dtype], "device_map": None},
        bf16=cfg.precision == "bf16",
        gradient_checkpointing=cfg.gradient_checkpointing,
        seed=cfg.seed,
        shuffle_dataset=False,  # step_questions has shuffled, for both trainers alike
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=cfg.updates_per_batch,  # a row a step, as ours: means over its updates
        report_to="none",
        save_strategy="no",  # the callback says when
        save_total_limit=KEPT,
        disable_tqdm=True,
        **engine,
    )
    if config.device.type == "cuda":
        config._n_gpu = 1  # of each process; a single one would split its batches over all the GPUs that it sees
    return config


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# TRL's names for the settings that it calls otherwise.
USED_AS = {
    "steps": "max_steps / num_iterations",
    "prompts_per_step": "generation_batch_size / num_generations",
    "group_size": "num_generations",
    "sequences_per_step": "per_device_train_batch_size x gradient_accumulation_steps x num_processes",
    "max_completion_tokens": "max_completion_length",
    "lr_schedule": "lr_scheduler_type",
    "importance_correction": "vllm_importance_sampling_correction, vllm_importance_sampling_mode",
    "importance_cap": "vllm_importance_sampling_clip_max",
    "kl_bias_correction": "use_bias_correction_kl",
    "importance_level": "importance_sampling_level",
    "updates_per_batch": "num_iterations",
    "old_logprobs": "old_per_token_logps: computed, or the policy's own",
    "max_tokens_per_micro_batch": "per_device_train_batch_size",
    "processes": "accelerate's num_processes",
    "precision": "bf16",
    "sampler": "use_vllm",
    "weights_dtype": "model_init_kwargs: dtype",
    "lora_rank": "peft_config: r",
    "lora_alpha": "peft_config: lora_alpha",
    "optimizer": "optim, adam_beta1, adam_beta2, adam_epsilon, weight_decay",
}


class ObservedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer, watched: what it reports to wandb and mlflow only, after the cap only, or as means of means.

    Args:
        clock: gets the phases.
        metrics: the run's metrics.csv, which goes into each checkpoint.
        rewards: whose faults are counted a step.
    """

    def __init__(self, *args: Any, clock: Clock, metrics: Path, rewards: Rewards, **kwargs: Any):
        super().__init__(*args, reward_funcs=[rewards.correctness_reward, rewards.format_reward], **kwargs)
        self.clock = clock
        self.questions_drawn: list[str] = []
        self.bad_rewards = 0
        self.degenerate_groups = 0.0
        self.observed = Observed()
        self._metrics_file = metrics
        self._rewards = rewards
        if self.use_vllm:
            push = self.vllm_generation.sync_weights

            def clocked_push() -> None:
                with clock("push"):
                    push()

            self.vllm_generation.sync_weights = clocked_push

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("rollout"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        self.questions_drawn = ranks.gather([row["id"] for row in inputs[:: self.num_generations]])
        with self.clock("reward"):
            rewards = super()._calculate_rewards(inputs, *args, **kwargs)  # (B, 2), of all processes
            self.bad_rewards = self._rewards.scoring.take(len(rewards))
        total = (rewards * self.reward_weights.to(rewards)).sum(1).view(-1, self.num_generations)  # (P, G)
        self.degenerate_groups = (total.amax(1) == total.amin(1)).float().mean().item()
        return rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logprobs = outputs[0].detach()
        return outputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"].bool()
        logged = {name: values[-1] for name, values in self._metrics["train"].items() if name in Observed.MEANS}
        self.observed.add_means(logged, mask, of_sequences=self.importance_sampling_level == "sequence")
        if "sampling_per_token_logps" in inputs:
            trainer = inputs.get("old_per_token_logps", self._logprobs)
            self.observed.add_mismatch(
                (trainer - inputs["sampling_per_token_logps"]).nan_to_num(nan=0.0),
                mask,
                inputs.get("importance_sampling_ratio"),
                self.vllm_importance_sampling_mode,
                self.vllm_importance_sampling_clip_max,
            )
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with self.clock.stopped():
            faults: list[Exception] = []
            try:
                super()._save_checkpoint(model, trial)
            except (OSError, RuntimeError, SafetensorError) as error:
                faults.append(error)
            faults = ranks.gather(faults)  # each process has written its random state
            if not ranks.first():
                return
            try:
                if faults:
                    raise faults[0]
                seal(folder, self._metrics_file)
            except (OSError, RuntimeError, SafetensorError) as error:
                say_unsaved(folder, error)


class Observed:
    """A step's means over all its tokens. TRL logs means of the micro-batches' means, which count short texts more."""

    # TRL's names -> columns
    MEANS: ClassVar = {
        "entropy": "entropy",
        "kl": "kl",
        "clip_ratio/region_mean": "clip_fraction",
        "cispo_clip_ratio": "clip_fraction",
    }

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._ratio_max = 0.0

    def add_means(self, logged: dict[str, float], mask: torch.Tensor, of_sequences: bool) -> None:
        """Take in what TRL logged for a micro-batch with (B, C) mask; clips of whole sequences count by sequence."""
        tokens, rows, kept = int(mask.sum()), len(mask), int(mask.any(1).sum())
        for name, value in logged.items():
            if of_sequences and self.MEANS[name] == "clip_fraction":
                self._take(self.MEANS[name], value * rows, kept)  # TRL counts masked sequences as not clipped
            else:
                self._take(self.MEANS[name], value * tokens, tokens)

    def add_mismatch(
        self, log_ratio: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None, mode: str, cap: float
    ) -> None:
        """Take in the (B, C) log ratio trainer / sampler and, if TRL corrects for it, its (B, C) or (B, 1) weights."""
        log_ratio = log_ratio.masked_fill(~mask, 0.0)
        of_sequences = weights is not None and mode.startswith("sequence")
        counted = mask.any(1, keepdim=True) if of_sequences else mask
        ratio = (log_ratio.sum(1, keepdim=True) if of_sequences else log_ratio).exp()[counted]
        self._ratio_max = max(self._ratio_max, ratio.max().item() if ratio.numel() else 0.0)
        self._take("logprob_difference", log_ratio.abs().sum().item(), int(mask.sum()))
        self._take("kl_sampler", (log_ratio.exp() - 1 - log_ratio).sum().item(), int(mask.sum()))  # k3
        if weights is not None:
            self._take("correction_mean", weights[counted].sum().item(), int(counted.sum()))
            self._take("corrected_share", int((ratio > cap).sum()), int(counted.sum()))

    def _take(self, name: str, value: float, count: int) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0) + count

    def columns(self) -> dict[str, float]:
        """The columns of metrics.csv, over all processes."""
        sums, counts = ranks.totals(self._sums), ranks.totals(self._counts)
        columns = {name: total / max(counts[name], 1) for name, total in sums.items()}
        if "logprob_difference" in columns:
            columns["sampler_ratio_max"] = max(ranks.gather([self._ratio_max]))
        return columns


def seconds_left(columns: dict[str, float]) -> float:
    """All of a step that is not one of the other phases: forward, backward and update."""
    phases = [s for name, s in columns.items() if name.startswith("seconds_") and name != "seconds_step"]
    return columns["seconds_step"] - sum(phases)


class OwnSampler:
    """TRL's own sampler, asked for the validation questions as our engines are."""

    def __init__(self, trainer: ObservedGRPOTrainer):
        self._trainer = trainer
        self.name = "vllm" if trainer.use_vllm else "transformers"

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        trainer = self._trainer
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            engine.sync_weights()
            if not engine.enable_sleep_mode:
                return vllm_generate(engine.llm, trainer.eos_token_ids, prompts, sampling)
            engine.llm.wake_up(tags=["kv_cache"])  # the push has woken the weights; TRL wakes the rest when it samples
            try:
                return vllm_generate(engine.llm, trainer.eos_token_ids, prompts, sampling)
            finally:
                engine.llm.sleep(level=2)
                engine._llm_weights_sleeping = True
        trainer.model.eval()
        groups = transformers_generate(
            trainer.model, trainer.eos_token_ids, prompts, sampling, batch=max(1, len(prompts))
        )
        trainer.model.train()
        return groups


class MetricsCallback(TrainerCallback):
    """Writes a row of metrics.csv for each of TRL's logs."""

    def __init__(
        self,
        record: RunRecord,
        trainer: ObservedGRPOTrainer,
        settings: dict[str, Any],
        validation: Validation,
        checkpoints: Checkpoints,
    ):
        self._checkpoints = checkpoints
        self._record = record
        self._validation = validation
        self._accuracy: float | None = None
        self._moved: WeightsMoved | None = None
        self._following = Following()
        self._updates = settings["grpo"]["updates_per_batch"]
        self._trainer = trainer
        self._weights = settings["grpo"]["reward_weights"]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._moved = self._moved or WeightsMoved(self._trainer.model)
        self._moved.remember()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._moved is not None
        self._moved.compare()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._accuracy = None
        step, updates_behind = divmod(state.global_step, self._updates)
        if not updates_behind and self._validation.due(step):
            with self._trainer.clock.stopped():
                self._accuracy = self._validation.accuracy(OwnSampler(self._trainer))
        if not updates_behind:
            control.should_save |= self._checkpoints.due(step)
            control.should_training_stop |= self._checkpoints.stopping

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates == 0:
            self._trainer.observed = Observed()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs:  # the summary at the end of training
            return
        trainer = self._trainer
        phases = trainer.clock.take()
        phases["seconds_train"] = seconds_left(phases)
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks.count()
        accuracy = logs["rewards/correctness_reward/mean"]
        observed = trainer.observed.columns()
        self._record.write(
            {
                "step": state.global_step // self._updates,
                "reward": logs["reward"],
                "reward_correct": self._weights["correct"] * accuracy,
                "reward_format": self._weights["format"] * logs["rewards/format_reward/mean"],
                "accuracy": accuracy,
                "degenerate_groups": trainer.degenerate_groups,
                "advantage_std": torch.tensor(list(trainer._logs["advantages"])).std().item(),
                "completion_length_mean": logs["completions/mean_length"],
                "completion_length_max": logs["completions/max_length"],
                "truncated_share": logs["completions/clipped_ratio"],
                "bad_rewards": trainer.bad_rewards,
                "grad_norm": logs["grad_norm"],
                "weights_moved": self._moved.share if self._moved else None,
                "learning_rate": logs["learning_rate"],
                "loss": logs["loss"],
                "tokens": round(logs["completions/mean_length"] * sequences),
                "prompts": prompts_digest(trainer.questions_drawn),
                "validation_accuracy": self._accuracy,
                **observed,
                **phases,
            }
        )
        self._following.check(state.global_step // self._updates, observed.get("logprob_difference"))


def train(
    settings: dict[str, Any], model_dir: Path, data_dir: Path, out: Path, tracking: str, checkpoint_every: int
) -> None:
    """Train the model in `model_dir` on the questions in `data_dir`; leave metrics, manifest and model in `out`."""
    check_gpu(settings, torch.cuda.is_available())
    cfg, instruction = settings["grpo"], settings["prompt"]["instruction"]
    ranks.start(cfg["processes"])
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, onto which torch cannot load a checkpoint
    verify(model_dir)
    checkpoints = Checkpoints(settings, "scripts.trl_grpo.train", model_dir, data_dir, checkpoint_every)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    questions = within_context(model_dir, tokenizer, read_rows(data_dir / "train.jsonl"), instruction)
    draws = step_questions(len(questions), cfg["prompts_per_step"], cfg["steps"], cfg["seed"])
    drawn = [questions[i] for draw in draws for i in draw]
    dataset = Dataset.from_list(
        [{"id": q["id"], "prompt": messages(q["question"], instruction), "gold": q["gold"]} for q in drawn]
    )
    validation = Validation(data_dir, settings, tokenizer)
    longest = longest_sequence(
        model_dir, tokenizer, questions + validation.questions, instruction, cfg["max_completion_tokens"]
    )

    run = namespace(settings)
    args = trl_config(settings, longest, checkpoints.folder)
    logits = args.per_device_train_batch_size * cfg["max_completion_tokens"] * len(tokenizer)
    # An estimate: with as many bytes a number as the hand-written loop's, a run on an H200 took 13 GiB more in all.
    memory = predict(model_dir, run.grpo, run.engine.memory_gib, 2 * logits)
    args.vllm_enable_sleep_mode = sleeps = engine_sleeps(run.engine, run.grpo, memory)

    clock = Clock()
    torch.manual_seed(cfg["seed"])  # of the adapters, which TRL makes before it sets its seed
    with engine_start_for_people(run.engine.memory_gib):
        trainer = ObservedGRPOTrainer(
            model=str(model_dir),
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=lora_config(cfg["lora_rank"], cfg["lora_alpha"]) if cfg["lora_rank"] else None,
            clock=clock,
            metrics=out / "metrics.csv",
            rewards=Rewards(stop_token_ids(model_dir)),
        )
    trainer.remove_callback(PrinterCallback)
    if cfg["importance_correction"] != "none" and not trainer.use_vllm:
        print("TRL samples with its own generation here, so importance_correction has nothing to correct", flush=True)
    resumed = checkpoints.newest()
    record = RunRecord(out, settings, tracking, resumed)
    trainer.add_callback(MetricsCallback(record, trainer, settings, validation, checkpoints))
    clock.take()  # what came before is no part of the first step
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    checkpoints.stop_here(trainer.state.global_step // trainer.num_iterations)
    # The validation is ours; without adapters alpha is nowhere; a budget of tokens is kept as a number of sequences.
    values = {name: cfg[name] for name in ("evaluate_every", "lora_alpha")} | used(trainer)
    values["max_tokens_per_micro_batch"] = max(
        cfg["max_tokens_per_micro_batch"], values["sequences_per_micro_batch"] * longest
    )
    measured = sizes(trainer.model, trainer.optimizer, trainer.ref_model) | {"total": record.most_memory}
    ledger = {"predicted": memory | {"total": peak(memory, sleeps)}, "measured": measured}
    trained = whole(trainer.model)
    record.finish("scripts.trl_grpo.train", values, USED_AS, trained, tokenizer, model_dir, data_dir, ledger)
    checkpoints.remove()


def used(trainer: GRPOTrainer) -> dict[str, Any]:
    """The values that this run really used, read off TRL's finished objects, under config.yaml's names."""
    args = trainer.args
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
    group = trainer.optimizer.optimizer.param_groups[0]
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    adapters = getattr(trainer.model, "peft_config", None)
    return {
        "steps": trainer.state.global_step // trainer.num_iterations,
        "prompts_per_step": sequences // trainer.num_generations,
        "group_size": trainer.num_generations,
        "processes": trainer.accelerator.num_processes,
        "sequences_per_step": sequences,
        "max_completion_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "learning_rate": group["initial_lr"],
        "lr_schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "warmup_steps": args.get_warmup_steps(args.max_steps) // trainer.num_iterations,
        "max_grad_norm": args.max_grad_norm,
        "epsilon": trainer.epsilon_low,
        "epsilon_high": trainer.epsilon_high,
        "delta": args.delta,
        "beta": trainer.beta,
        "kl_estimator": "k3",
        "kl_bias_correction": args.use_bias_correction_kl,
        "importance_level": trainer.importance_sampling_level,
        "mask_truncated_completions": trainer.mask_truncated_completions,
        "updates_per_batch": trainer.num_iterations,
        "old_logprobs": "recompute" if corrected or trainer.num_iterations > 1 else "detach",
        "loss_type": trainer.loss_type,
        "scale_rewards": trainer.scale_rewards,
        "reward_weights": dict(zip(("correct", "format"), map(float, trainer.reward_weights), strict=True)),
        "importance_correction": trainer.vllm_importance_sampling_mode if corrected else "none",
        "importance_cap": trainer.vllm_importance_sampling_clip_max,
        "sync_every": 1,
        "sequences_per_micro_batch": args.per_device_train_batch_size,
        "gradient_checkpointing": args.gradient_checkpointing,
        "precision": "bf16" if args.bf16 else "fp32",
        "seed": args.seed,
        "optimizer": f"AdamW, betas {group['betas']}, eps {group['eps']}, weight decay {group['weight_decay']}",
        "advantage_epsilon": 1e-4,
        "weights_dtype": next(name for name, dtype in DTYPES.items() if dtype in str(trainer.model.dtype)),
        "lora_rank": adapters["default"].r if adapters else 0,
        **({"lora_alpha": adapters["default"].lora_alpha} if adapters else {}),
        "sampler": "vllm" if trainer.use_vllm else "transformers",
    }


if __name__ == "__main__":
    with errors_for_people():
        arguments = run_arguments(__doc__)
        train(
            arguments.settings,
            arguments.model,
            arguments.data,
            arguments.out,
            arguments.tracking,
            arguments.checkpoint_every,
        )
