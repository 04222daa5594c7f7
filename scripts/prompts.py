"""The prompt: the same text in warm start, training and evaluation."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from scripts.settings import SettingsError


def messages(question: str, instruction: str) -> list[dict[str, str]]:
    """One user message: the question, then the instruction on a line of its own."""
    return [{"role": "user", "content": f"{question}\n{instruction}".rstrip()}]


# Qwen3 thinks unless told otherwise, and 512 tokens of thought mostly end in truncation: reward 0 and no gradient.
TEMPLATE_OPTIONS = {"enable_thinking": False}


def prompt_text(tokenizer: PreTrainedTokenizerBase, question: str, instruction: str) -> str:
    """The prompt as the model reads it, with the opening of the assistant's turn."""
    return tokenizer.apply_chat_template(
        messages(question, instruction), tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS
    )


def longest_sequence(
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[dict[str, str]],
    instruction: str,
    max_completion_tokens: int,
) -> int:
    """Tokens of the longest prompt and the longest completion that may follow it.

    Raises:
        SettingsError: the model's context does not hold them.
    """
    texts = [prompt_text(tokenizer, q["question"], instruction) for q in questions]
    prompt = max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    context = AutoConfig.from_pretrained(model_dir).max_position_embeddings
    if prompt + max_completion_tokens > context:
        raise SettingsError(
            f"max_completion_tokens: {max_completion_tokens} and the longest prompt ({prompt} tokens) do not fit "
            f"into the context of {model_dir} ({context} tokens); lower it to at most {context - prompt}"
        )
    return prompt + max_completion_tokens
