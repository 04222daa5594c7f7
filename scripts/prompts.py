"""The prompt: the same text in warm start, training and evaluation."""

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
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except ValueError as error:
        raise ModelFilesError(f"{model_dir} cannot be loaded: {str(error).splitlines()[0]}") from error
    context = getattr(config, "max_position_embeddings", None)
    texts = [prompt_text(tokenizer, q["question"], instruction) for q in questions]
    lengths = list(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    prompt = max(lengths)
    if context is None:  # a state-space model has no bound
        return prompt + max_completion_tokens
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
