"""Accuracy on the validation split while a run trains; the test set is never touched for that."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from scripts import ranks
from scripts.grpo_scratch.rewards import correctness_reward
from scripts.grpo_scratch.rollout import Sampler, Sampling, rollout
from scripts.prepared import read_rows


class Validation:
    """The validation questions of a run and when to ask them."""

    def __init__(self, data_dir: Path, settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase):
        self.questions = read_rows(data_dir / "validation.jsonl")
        self._instruction = settings["prompt"]["instruction"]
        self._every = settings["grpo"]["evaluate_every"]
        self._sampling = Sampling(1, settings["grpo"]["max_completion_tokens"], temperature=0.0, logprobs=False)
        self._tokenizer = tokenizer

    def due(self, step: int) -> bool:
        """Whether `evaluate_every` asks for a validation after this step."""
        return bool(self._every) and step % self._every == 0

    def accuracy(self, engine: Sampler) -> float:
        """Share of the validation questions that `engine` answers right, greedily (flexible score)."""
        asked = list(ranks.share(self.questions))
        samples = rollout(engine, self._tokenizer, asked, self._instruction, self._sampling)
        right = [correctness_reward(s.text, s.question["gold"], s.completion.truncated) for s in samples]
        return sum(ranks.gather(right)) / len(self.questions)
