"""The same run with TRL's GRPOTrainer: the same prompts, rewards, schedule, precision and sequences a step.

python -m scripts.trl_grpo.train --run trl --model models/demo --data data/demo --out results/trl
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from scripts.cli import errors_for_people, run_arguments
from scripts.grpo_scratch.rewards import correctness_reward as score_correct
from scripts.grpo_scratch.rewards import format_reward as score_format
from scripts.grpo_scratch.rollout import Completion, Sampling, transformers_generate, vllm_generate
from scripts.prepared import read_rows, verify
from scripts.prompts import TEMPLATE_OPTIONS, longest_sequence, messages
from scripts.run_record import Clock, RunRecord, prompts_digest, step_questions
from scripts.settings import namespace
from scripts.validation import Validation


def correctness_reward(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
    """TRL's calling convention around the one grader; its name is the metric's name."""
    return [score_correct(completion, answer) for completion, answer in zip(completions, gold, strict=True)]


def format_reward(completions: list[Any], **_: Any) -> list[float]:
    """Likewise for the form of the answer."""
    return [score_format(completion) for completion in completions]


def trl_config(settings: dict[str, Any], max_length: int, out: Path) -> GRPOConfig:
    """config.yaml's names -> TRL's. What is not named here is at TRL's default."""
    run = namespace(settings)
    cfg = run.grpo
    sequences = cfg.prompts_per_step * cfg.group_size
    on_gpu = torch.cuda.is_available()
    use_vllm = on_gpu and run.engine.name != "transformers" and importlib.util.find_spec("vllm") is not None
    engine: dict[str, Any] = {"use_vllm": False}
    if use_vllm:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": run.engine.memory_gib * 2**30 / torch.cuda.mem_get_info()[1],
            "vllm_max_model_length": max_length,
            "vllm_importance_sampling_correction": cfg.importance_correction != "none",
        }
        if cfg.importance_correction != "none":
            engine["vllm_importance_sampling_mode"] = cfg.importance_correction
    return GRPOConfig(
        output_dir=str(out),
        max_steps=cfg.steps,
        per_device_train_batch_size=cfg.micro_batch_size,  # counts sequences, not prompts
        gradient_accumulation_steps=sequences // cfg.micro_batch_size,
        num_generations=cfg.group_size,
        max_completion_length=cfg.max_completion_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        chat_template_kwargs=TEMPLATE_OPTIONS,
        learning_rate=cfg.learning_rate,
        lr_scheduler_type=cfg.lr_schedule,
        warmup_steps=cfg.warmup_steps,
        max_grad_norm=cfg.max_grad_norm,
        weight_decay=0.0,
        epsilon=cfg.epsilon,
        epsilon_high=cfg.epsilon_high,
        beta=cfg.beta,
        loss_type=cfg.loss_type,
        scale_rewards=cfg.scale_rewards,
        vllm_importance_sampling_clip_max=cfg.importance_cap,
        reward_weights=[cfg.reward_weights.correct, cfg.reward_weights.format],
        model_init_kwargs={"dtype": "float32"},  # the weights that learn; bf16 is autocast
        bf16=cfg.precision == "bf16",
        gradient_checkpointing=cfg.gradient_checkpointing,
        seed=cfg.seed,
        shuffle_dataset=False,  # step_questions has shuffled, for both trainers alike
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **engine,
    )


# TRL's names for the settings that it calls otherwise.
USED_AS = {
    "steps": "max_steps",
    "prompts_per_step": "generation_batch_size / num_generations",
    "group_size": "num_generations",
    "sequences_per_step": "per_device_train_batch_size x gradient_accumulation_steps",
    "max_completion_tokens": "max_completion_length",
    "lr_schedule": "lr_scheduler_type",
    "importance_correction": "vllm_importance_sampling_correction, vllm_importance_sampling_mode",
    "importance_cap": "vllm_importance_sampling_clip_max",
    "micro_batch_size": "per_device_train_batch_size",
    "precision": "bf16",
    "sampler": "use_vllm",
    "weights_dtype": "model_init_kwargs: dtype",
    "optimizer": "optim, adam_beta1, adam_beta2, adam_epsilon, weight_decay",
}


class ClockedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with our clock on its phases, which it reports to wandb and mlflow only."""

    def __init__(self, *args: Any, clock: Clock, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.clock = clock
        self.questions_drawn: list[str] = []
        if self.use_vllm:
            push = self.vllm_generation.sync_weights

            def clocked_push() -> None:
                with clock("push"):
                    push()

            self.vllm_generation.sync_weights = clocked_push

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        self.questions_drawn = [row["id"] for row in inputs[:: self.num_generations]]
        with self.clock("reward"):
            return super()._calculate_rewards(inputs, *args, **kwargs)


class OwnSampler:
    """TRL's own sampler, asked for the validation questions as our engines are."""

    def __init__(self, trainer: ClockedGRPOTrainer):
        self._trainer = trainer
        self.name = "vllm" if trainer.use_vllm else "transformers"

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        trainer = self._trainer
        if trainer.use_vllm:
            trainer.vllm_generation.sync_weights()
            return vllm_generate(trainer.vllm_generation.llm, trainer.eos_token_ids, prompts, sampling)
        trainer.model.eval()
        groups = transformers_generate(trainer.model, trainer.eos_token_ids, prompts, sampling, batch=len(prompts))
        trainer.model.train()
        return groups

    def load_weights(self, weights: Any) -> None:
        raise NotImplementedError("TRL pushes weights itself")


class MetricsCallback(TrainerCallback):
    """Writes a row of metrics.csv for each of TRL's logs."""

    def __init__(
        self, record: RunRecord, trainer: ClockedGRPOTrainer, settings: dict[str, Any], validation: Validation
    ):
        self._record = record
        self._validation = validation
        self._accuracy: float | None = None
        self._trainer = trainer
        self._weights = settings["grpo"]["reward_weights"]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._accuracy = None
        if self._validation.due(state.global_step):
            with self._trainer.clock.stopped():
                self._accuracy = self._validation.accuracy(OwnSampler(self._trainer))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs:  # the summary at the end of training
            return
        trainer = self._trainer
        phases = trainer.clock.take()
        # All of the step that is not one of the other phases is forward, backward and update.
        phases["seconds_train"] = phases["seconds_step"] - sum(v for k, v in phases.items() if k != "seconds_step")
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
        accuracy = logs["rewards/correctness_reward/mean"]
        self._record.write(
            {
                "step": state.global_step,
                "reward": logs["reward"],
                "reward_correct": self._weights["correct"] * accuracy,
                "reward_format": self._weights["format"] * logs["rewards/format_reward/mean"],
                "accuracy": accuracy,
                "advantage_std": torch.tensor(list(trainer._logs["advantages"])).std().item(),
                "degenerate_groups": logs["frac_reward_zero_std"],
                "kl": logs.get("kl"),
                "entropy": logs["entropy"],
                "clip_fraction": logs.get("clip_ratio/region_mean"),
                "correction_mean": logs.get("sampling/importance_sampling_ratio/mean"),
                "logprob_difference": logs.get("sampling/sampling_logp_difference/mean"),
                "completion_length_mean": logs["completions/mean_length"],
                "completion_length_max": logs["completions/max_length"],
                "truncated_share": logs["completions/clipped_ratio"],
                "grad_norm": logs["grad_norm"],
                "learning_rate": logs["learning_rate"],
                "loss": logs["loss"],
                "tokens": round(logs["completions/mean_length"] * sequences),
                "prompts": prompts_digest(trainer.questions_drawn),
                "validation_accuracy": self._accuracy,
                **phases,
            }
        )


def train(settings: dict[str, Any], model_dir: Path, data_dir: Path, out: Path, tracking: str) -> None:
    """Train the model in `model_dir` on the questions in `data_dir`; leave metrics, manifest and model in `out`."""
    cfg, instruction = settings["grpo"], settings["prompt"]["instruction"]
    verify(model_dir)
    questions = read_rows(data_dir / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    draws = step_questions(len(questions), cfg["prompts_per_step"], cfg["steps"], cfg["seed"])
    drawn = [questions[i] for draw in draws for i in draw]
    dataset = Dataset.from_list(
        [{"id": q["id"], "prompt": messages(q["question"], instruction), "gold": q["gold"]} for q in drawn]
    )
    validation = Validation(data_dir, settings, tokenizer)
    longest = longest_sequence(
        model_dir, tokenizer, questions + validation.questions, instruction, cfg["max_completion_tokens"]
    )

    clock = Clock()
    trainer = ClockedGRPOTrainer(
        model=str(model_dir),
        reward_funcs=[correctness_reward, format_reward],
        args=trl_config(settings, longest, out),
        train_dataset=dataset,
        processing_class=tokenizer,
        clock=clock,
    )
    trainer.remove_callback(PrinterCallback)
    record = RunRecord(out, settings, tracking)
    trainer.add_callback(MetricsCallback(record, trainer, settings, validation))
    clock.take()  # what came before is no part of the first step
    trainer.train()
    values = {**used(trainer), "evaluate_every": cfg["evaluate_every"]}  # the validation is ours
    record.finish("scripts.trl_grpo.train", values, USED_AS, trainer.model, tokenizer, model_dir, data_dir)


def used(trainer: GRPOTrainer) -> dict[str, Any]:
    """The values that this run really used, read off TRL's finished objects, under config.yaml's names."""
    args = trainer.args
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
    group = trainer.optimizer.optimizer.param_groups[0]
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    return {
        "steps": trainer.state.global_step,
        "prompts_per_step": sequences // trainer.num_generations,
        "group_size": trainer.num_generations,
        "sequences_per_step": sequences,
        "max_completion_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "learning_rate": group["initial_lr"],
        "lr_schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "warmup_steps": args.get_warmup_steps(args.max_steps),
        "max_grad_norm": args.max_grad_norm,
        "epsilon": trainer.epsilon_low,
        "epsilon_high": trainer.epsilon_high,
        "beta": trainer.beta,
        "loss_type": trainer.loss_type,
        "scale_rewards": trainer.scale_rewards,
        "reward_weights": dict(zip(("correct", "format"), map(float, trainer.reward_weights), strict=True)),
        "importance_correction": trainer.vllm_importance_sampling_mode if corrected else "none",
        "importance_cap": trainer.vllm_importance_sampling_clip_max,
        "sync_every": 1,
        "micro_batch_size": args.per_device_train_batch_size,
        "gradient_checkpointing": args.gradient_checkpointing,
        "precision": "bf16" if args.bf16 else "fp32",
        "seed": args.seed,
        "optimizer": f"AdamW, betas {group['betas']}, eps {group['eps']}, weight decay {group['weight_decay']}",
        "advantage_epsilon": 1e-4,
        "weights_dtype": str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        "sampler": "vllm" if trainer.use_vllm else "transformers",
    }


if __name__ == "__main__":
    with errors_for_people():
        arguments = run_arguments(__doc__)
        train(arguments.settings, arguments.model, arguments.data, arguments.out, arguments.tracking)
