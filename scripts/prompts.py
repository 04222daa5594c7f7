"""The prompt: the same text in warm start, training and evaluation."""

from transformers import PreTrainedTokenizerBase


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


def longest_prompt(tokenizer: PreTrainedTokenizerBase, questions: list[dict[str, str]], instruction: str) -> int:
    """Tokens of the longest prompt."""
    texts = [prompt_text(tokenizer, q["question"], instruction) for q in questions]
    return max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
