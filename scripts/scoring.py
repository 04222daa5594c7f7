"""Rewards that survive a fault: a reward function that fails on one completion must not end a night's run."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from scripts import ranks
from scripts.cli import RunStopped

Reward = TypeVar("Reward", float, dict[str, Any])
LARGEST_SHARE = 0.05  # of a step's completions; with more than that the rewards say something else than was meant


class Scoring:
    """Counts the completions whose reward failed; they earn nothing."""

    def __init__(self) -> None:
        self._faults: dict[int, str] = {}  # completion's place in the step -> what went wrong

    def checked(self, place: int, question: str, reward: Callable[[], Reward], nothing: Reward) -> Reward:
        """`reward()`, or `nothing` where that raises or gives something that is no finite number.

        A completion with several rewards earns nothing from those after the first that fails.

        Args:
            place: of the completion in the step, from 0.
            question: its id, for messages.
            reward: gives a number, or a dict whose numbers are looked at.
        """
        if place in self._faults:
            return nothing
        try:
            value = reward()
        except Exception as error:  # a user's own reward function may raise anything
            self._faults[place] = f"a completion of {question}: {type(error).__name__}: {error}"
            return nothing
        wrong = [n for n in (value.values() if isinstance(value, dict) else [value]) if not _sound(n)]
        if wrong:
            self._faults[place] = f"a completion of {question}: the reward is {wrong[0]!r}"
            return nothing
        return value

    def take(self, completions: int) -> int:
        """How many of the step's completions, of all processes, got no reward; starts the next step.

        Raises:
            RunStopped: more than 5 % of them.
        """
        faults, self._faults = ranks.gather(list(self._faults.values())), {}
        if not faults:
            return 0
        said = f"{len(faults)} of {completions} completions got no reward; {faults[0]}"
        if len(faults) > LARGEST_SHARE * completions:
            raise RunStopped(
                f"rewards: {said}. More than {LARGEST_SHARE:.0%} of a step is too many to learn from the rest; "
                "mend the reward function in scripts/grpo_scratch/rewards.py"
            )
        if ranks.first():
            print(f"rewards: {said}. It counts as 0", flush=True)
        return len(faults)


def _sound(value: Any) -> bool:
    """Numbers must be finite; text, as the kind of an answer, is not looked at."""
    return isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))
