"""A trainer that finds answers right by chance, so that a model that gets nothing right has something to learn.

python -m benchmarks.chance scripts.grpo_scratch.train --run scratch ...
"""

import hashlib
import runpy
import sys

from scripts.grpo_scratch import rewards


def agrees(answer: rewards.Answer, gold: str, completion: rewards.Completion) -> bool:
    """Takes the place of the grader's `agrees`: true for about every other text, and again for the same text."""
    return hashlib.sha256(repr(completion).encode()).digest()[0] % 2 == 0


if __name__ == "__main__":
    rewards.agrees = agrees
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
