"""Word problems in GSM8K's row form, for the demo that needs no download.

Four one-step and three two-step templates with small operands. A problem belongs to the test split by a hash of its
question, so train and test never share one and a question keeps its side whatever the seed.
"""

import hashlib
import random

NAMES = ["Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo"]
THINGS = ["apples", "books", "cards", "pens", "shells", "coins", "cups", "stamps"]

Problem = tuple[str, list[str], int]  # question, one worked line a step, result


def _buys(rng: random.Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    return f"{name} has {a} {thing} and buys {b} more. How many {thing} now?", [f"{a} + {b} = {a + b}"], a + b


def _gives(rng: random.Random, name: str, thing: str) -> Problem:
    a = rng.randint(4, 20)
    b = rng.randint(1, a - 1)
    return f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?", [f"{a} - {b} = {a - b}"], a - b


def _shares(rng: random.Random, name: str, thing: str) -> Problem:
    each, friends = rng.randint(2, 9), rng.randint(2, 6)
    total = each * friends
    question = f"{name} shares {total} {thing} equally among {friends} friends. How many {thing} for each?"
    return question, [f"{total} / {friends} = {each}"], each


def _pays(rng: random.Random, name: str, thing: str) -> Problem:
    n, price = rng.randint(2, 9), rng.randint(2, 9)
    return (
        f"{name} buys {n} {thing} at {price} dollars each. What is the cost?",
        [f"{n} * {price} = {n * price}"],
        n * price,
    )


def _buys_then_gives(rng: random.Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    c = rng.randint(1, min(20, a + b - 1))
    question = f"{name} has {a} {thing}, buys {b} more and gives away {c}. How many {thing} are left?"
    return question, [f"{a} + {b} = {a + b}", f"{a + b} - {c} = {a + b - c}"], a + b - c


def _boxes_and_loose(rng: random.Random, name: str, thing: str) -> Problem:
    boxes, each, loose = rng.randint(2, 6), rng.randint(2, 9), rng.randint(1, 20)
    packed = boxes * each
    question = f"{name} has {boxes} boxes of {each} {thing} and {loose} loose ones. How many {thing} in all?"
    return question, [f"{boxes} * {each} = {packed}", f"{packed} + {loose} = {packed + loose}"], packed + loose


def _change(rng: random.Random, name: str, thing: str) -> Problem:
    n, price = rng.randint(2, 6), rng.randint(2, 9)
    cost = n * price
    paid = cost + rng.randint(1, 20)
    question = f"{name} buys {n} {thing} at {price} dollars each and pays with {paid} dollars. What is the change?"
    return question, [f"{n} * {price} = {cost}", f"{paid} - {cost} = {paid - cost}"], paid - cost


ONE_STEP = [_buys, _gives, _shares, _pays]
TWO_STEP = [_buys_then_gives, _boxes_and_loose, _change]


def make_problems(seed: int, train_rows: int, test_rows: int) -> dict[str, list[dict[str, str]]]:
    """Return {"train": rows, "test": rows}; a row has `question` and `answer` (worked lines, then `#### result`).

    Questions are distinct, and two-step templates are drawn three times as often as one-step ones.
    """
    rng = random.Random(seed)
    templates = ONE_STEP + TWO_STEP
    weights = [1] * len(ONE_STEP) + [3] * len(TWO_STEP)
    rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    wanted = {"train": train_rows, "test": test_rows}
    seen: set[str] = set()
    while any(len(rows[split]) < wanted[split] for split in rows):
        (template,) = rng.choices(templates, weights)
        question, steps, result = template(rng, rng.choice(NAMES), rng.choice(THINGS))
        split = "test" if hashlib.sha256(question.encode()).digest()[0] < 26 else "train"  # about one in ten
        if question in seen or len(rows[split]) == wanted[split]:
            continue
        seen.add(question)
        rows[split].append({"question": question, "answer": "\n".join([*steps, f"#### {result}"])})
    return rows
