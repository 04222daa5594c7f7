"""Builds the demo's model: a tiny Qwen3 with its own tokenizer, warm-started on generated problems.

The warm start plants a habit: most two-step solutions stop after the first step and answer with its result. Sampling
still finds the whole solution now and then, and that is what GRPO has to reinforce. So the demo's gain shows that the
loop works; it says nothing about learning arithmetic.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, get_scheduler

from scripts.cli import errors_for_people
from scripts.prepare.demo_problems import make_problems
from scripts.prepared import model_files, write_record
from scripts.prompts import prompt_text

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 256  # tokens
PROBLEMS, DRILLS = 24, 8  # rows of each kind in a batch
EQUATIONS = 6  # in a drill row


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that keeps digits single, so that arithmetic is seen digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?\p{L}+|\n|."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1024, min_frequency=20, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def careless(answer: str) -> str:
    """The answer cut after its first step: `4 * 5 = 20 / 37 - 20 = 17 / #### 17` becomes `4 * 5 = 20 / #### 20`."""
    first = answer.split("\n")[0]
    return f"{first}\n#### {first.split(' = ')[1]}"


def drill(rng: random.Random) -> str:
    """One row of bare equations: the arithmetic of the problems without their stories."""
    equations = []
    for _ in range(EQUATIONS):
        a, b = rng.randint(1, 54), rng.randint(1, 20)
        c, d = rng.randint(2, 9), rng.randint(2, 9)
        equations.append(
            rng.choice([f"{a} + {b} = {a + b}", f"{a + b} - {b} = {a}", f"{c} * {d} = {c * d}", f"{c * d} / {d} = {c}"])
        )
    return "\n".join(equations)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[dict[str, str]],
    settings: dict[str, Any],
) -> None:
    """Supervised training of `model` in place."""
    rng = random.Random(settings["seed"])
    steps = settings["warm_start_steps"]
    # Muon for the matrices learns these problems in half the steps that AdamW alone needs.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(others, lr=3e-3, fused=True)]
    warmup = min(50, steps // 10)
    schedules = [get_scheduler("cosine", optimizer, warmup, steps) for optimizer in optimizers]

    def row(prompt: str, answer: str) -> tuple[list[int], list[int]]:
        p, a = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id]
        return p + a, [-100] * len(p) + a  # -100: not trained on

    encoded = []
    for problem in problems:
        question, answer = problem["question"], problem["answer"]
        prompt = prompt_text(tokenizer, question, settings["instruction"])
        whole = row(prompt, answer)
        encoded.append((whole, row(prompt, careless(answer)) if answer.count("\n") == 2 else whole))

    bar = tqdm(range(steps), desc="warm start", unit="step", mininterval=2)
    for _ in bar:
        rows = [row("", drill(rng)) for _ in range(DRILLS)]
        drawn = rng.sample(encoded, PROBLEMS)
        rows += [cut if rng.random() < settings["careless_share"] else whole for whole, cut in drawn]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), length), tokenizer.pad_token_id)  # (B, T)
        labels = torch.full((len(rows), length), -100)  # (B, T)
        for i, (tokens, target) in enumerate(rows):
            ids[i, : len(tokens)], labels[i, : len(target)] = torch.tensor(tokens), torch.tensor(target)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=json.loads, required=True, help="the model section of the settings, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    args = parser.parse_args()
    settings = args.settings

    torch.manual_seed(settings["seed"])
    problems = make_problems(settings["seed"], train_rows=6000, test_rows=0)["train"]
    texts = [f"user\n{p['question']}\n{settings['instruction']}\nassistant\n{p['answer']}" for p in problems]
    tokenizer = build_tokenizer(texts)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True, dtype="float32",
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    print(
        f"demo model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens; "
        f"warm start of {settings['warm_start_steps']} steps, about a minute on two cores",
        flush=True,
    )
    warm_start(model, tokenizer, problems, settings)
    for old in model_files(args.out):
        old.unlink()  # a link that an earlier source left here would be written through, into that source
    with errors_for_people():
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        write_record(args.out, source="builtin", name=settings["name"], revision=None)


if __name__ == "__main__":
    main()
