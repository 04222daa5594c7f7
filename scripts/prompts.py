"""The prompt: the same text in warm start, training and evaluation."""

import math
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoConfig, PreTrainedTokenizerBase

from scripts.prepared import ModelFilesError
from scripts.settings import SettingsError


def messages(question: str, instruction: str) -> list[dict[str, str]]:
    """One user message: the question, then the instruction on a line of its own."""
    return [{"role": "user", "content": f"{question}\n{instruction}".rstrip()}]


# Qwen3 thinks unless told otherwise, and 512 tokens of thought mostly end in truncation: reward 0 and no gradient.
TEMPLATE_OPTIONS = {"enable_thinking": False}


def prompt_text(tokenizer: PreTrainedTokenizerBase, question: str, instruction: str) -> str:
    """The prompt as the model reads it, with the opening of the assistant's turn.

    Raises:
        ModelFilesError: the chat template does not take it.
    """
    try:
        return tokenizer.apply_chat_template(
            messages(question, instruction), tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS
        )
    except TemplateError as error:
        raise ModelFilesError(
            f"The chat template of {tokenizer.name_or_path} does not take one message of a user: {error}. "
            "Mend it in a copy of the model (source: local), or take another model."
        ) from error


def within_context(
    model_dir: Path, tokenizer: PreTrainedTokenizerBase, questions: list[dict[str, str]], instruction: str
) -> list[dict[str, str]]:
    """Questions to train on: those whose prompt the model's context holds. Names the others, if they are not all."""
    context, lengths = context_and_lengths(model_dir, tokenizer, questions, instruction)
    fitting = [q for q, length in zip(questions, lengths, strict=True) if length < context]
    if 0 < len(fitting) < len(questions):
        names = [q["id"] for q, length in zip(questions, lengths, strict=True) if length >= context]
        print(
            f"{len(names)} of {len(questions)} questions are not trained on, as the prompt alone fills the context of "
            f"{model_dir} ({context} tokens): {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}",
            flush=True,
        )
    return fitting or questions


def longest_sequence(
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[dict[str, str]],
    instruction: str,
    max_completion_tokens: int,
) -> int:
    """Tokens of the longest prompt and the longest completion that may follow it.

    A tokenizer that names no pad token gets its end token for one, as TRL does: padding is masked everywhere.

    Raises:
        SettingsError: the model's context does not hold them.
        ModelFilesError: the model is none that can be loaded here.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelFilesError(
                f"{model_dir} names no eos_token; set it in its tokenizer_config.json (source: local)."
            )
        tokenizer.pad_token = tokenizer.eos_token
    context, lengths = context_and_lengths(model_dir, tokenizer, questions, instruction)
    prompt = max(lengths)
    if prompt >= context:
        longest = questions[lengths.index(prompt)]
        raise SettingsError(
            f"{longest['id']}: the prompt alone has {prompt} tokens, the context of {model_dir} {context}; take the "
            "question out of your data, or another model"
        )
    if prompt + max_completion_tokens > context:
        raise SettingsError(
            f"max_completion_tokens: {max_completion_tokens} and the longest prompt ({prompt} tokens) do not fit "
            f"into the context of {model_dir} ({context} tokens); lower it to at most {context - prompt}"
        )
    return prompt + max_completion_tokens


def context_and_lengths(
    model_dir: Path, tokenizer: PreTrainedTokenizerBase, questions: list[dict[str, str]], instruction: str
) -> tuple[float, list[int]]:
    """Tokens that the model's context holds (inf: a state-space model has no bound), and those of each prompt."""
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except ValueError as error:
        raise ModelFilesError(f"{model_dir} cannot be loaded: {str(error).splitlines()[0]}") from error
    texts = [prompt_text(tokenizer, q["question"], instruction) for q in questions]
    lengths = list(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    return getattr(config, "max_position_embeddings", None) or math.inf, lengths
