"""Evaluation on the whole test set: results/<run>/eval.json and every completion in samples.jsonl.

python -m scripts.evaluate --run baseline --model models/demo --data data/demo --out results/baseline --settings JSON
"""

import argparse
import json
import time
from collections import Counter
from fractions import Fraction
from math import comb
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from scipy.stats import binomtest
from transformers import AutoConfig, AutoTokenizer

from scripts.cli import check_gpu, errors_for_people
from scripts.grpo_scratch.rewards import agrees, extract_answer, strict_match
from scripts.grpo_scratch.rollout import Sample, Sampling, build_engine, rollout
from scripts.prepared import decimal_text, read_rows, verify
from scripts.prompts import longest_sequence
from scripts.settings import namespace

SEQUENCES = 512  # decoded at once


def evaluate(settings: dict[str, Any], run: str, model_dir: Path, data_dir: Path, out: Path) -> dict[str, Any]:
    """Answer every test question once, greedily, and grade the answers.

    Returns:
        What eval.json holds: strict (the number on the final #### line) and flexible (what the completion commits to)
        accuracy with 95 % Wilson intervals, how answers were found, truncated share, seconds; pass@k and majority vote
        where evaluation.samples asks for more than one answer.
    """
    check_gpu(settings, torch.cuda.is_available())
    verify(model_dir)
    questions = read_rows(data_dir / "test.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    instruction, max_tokens = settings["prompt"]["instruction"], settings["evaluation"]["max_completion_tokens"]
    max_length = longest_sequence(model_dir, tokenizer, questions, instruction, max_tokens)
    precision = "fp32" if str(AutoConfig.from_pretrained(model_dir).dtype) == "torch.float32" else "bf16"
    engine = build_engine(model_dir, namespace(settings["engine"]), max_length, SEQUENCES, precision, compiled=False)
    print(f"{run}: {len(questions)} test questions, at most {max_tokens} tokens each, engine {engine.name}", flush=True)
    started = time.perf_counter()
    samples = rollout(
        engine, tokenizer, questions, instruction, Sampling(1, max_tokens, temperature=0.0, logprobs=False)
    )
    seconds = time.perf_counter() - started
    rows = [graded(sample) for sample in samples]

    result: dict[str, Any] = {}
    n, temperature = settings["evaluation"]["samples"], settings["evaluation"]["temperature"]
    if n > 1:
        print(f"{run}: {n} more answers to each question, at temperature {temperature:g}", flush=True)
        sampling = Sampling(n, max_tokens, temperature, logprobs=False)
        drawn = rollout(engine, tokenizer, questions, instruction, sampling)
        groups = [drawn[i : i + n] for i in range(0, len(drawn), n)]
        for row, group in zip(rows, groups, strict=True):
            row |= graded_group(group)
        result["sampled"] = {
            "samples": n,
            "temperature": temperature,
            "pass_at_k": {str(k): mean(pass_at_k(n, row["sampled_correct"], k) for row in rows) for k in powers(n)},
            "majority": with_interval(sum(row["majority_correct"] for row in rows), len(rows)),
        }

    out.mkdir(parents=True, exist_ok=True)
    with (out / "samples.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    truncated = sum(row["truncated"] for row in rows)
    result |= {
        "run": run,
        "rows": len(rows),
        "flexible": with_interval(sum(row["correct"] for row in rows), len(rows)),
        "strict": with_interval(sum(row["strict"] for row in rows), len(rows)),
        "truncated": {"count": truncated, "share": truncated / len(rows)},
        "answer_kinds": dict(sorted(Counter(row["kind"] for row in rows).items())),
        "completion_length_mean": sum(row["tokens"] for row in rows) / len(rows),
        "seconds": round(seconds, 2),
        "engine": engine.name,
        "max_completion_tokens": max_tokens,
    }
    (out / "eval.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    flexible, strict = result["flexible"], result["strict"]
    print(
        f"{run}: flexible {flexible['accuracy']:.1%} ({flexible['low']:.1%} to {flexible['high']:.1%}), "
        f"strict {strict['accuracy']:.1%}, truncated {truncated / len(rows):.1%}, {seconds:.1f} s"
    )
    return result


def graded(sample: Sample) -> dict[str, Any]:
    """A row of samples.jsonl."""
    answer = extract_answer(sample.text, sample.completion.truncated)
    gold = sample.question["gold"]
    return {
        "id": sample.question["id"],
        "question": sample.question["question"],
        "gold": gold,
        "completion": sample.text,
        "answer": None if answer.value is None else shown(answer.value),
        "kind": answer.kind,
        "correct": agrees(answer, gold, sample.text),
        "strict": strict_match(sample.text, gold),
        "truncated": sample.completion.truncated,
        "tokens": len(sample.completion.token_ids),
    }


def graded_group(group: list[Sample]) -> dict[str, Any]:
    """What samples.jsonl keeps of several answers to one question: how many are right, and the majority's."""
    gold = group[0].question["gold"]
    answers = [extract_answer(sample.text, sample.completion.truncated) for sample in group]
    values = [answer.value for answer in answers]
    votes = Counter(value for value in values if value is not None)
    majority = votes.most_common(1)[0][0] if votes else None  # the first seen, where two are level
    right = [agrees(answer, gold, sample.text) for answer, sample in zip(answers, group, strict=True)]
    return {
        "sampled_correct": sum(right),
        "majority_answer": None if majority is None else shown(majority),
        "majority_correct": majority is not None and right[values.index(majority)],
    }


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k answers is right, from n answers of which `correct` are: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1).
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)


def powers(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def shown(value: Fraction) -> str:
    """A number as a person writes it: 1200, 0.25, 1/3."""
    try:
        return decimal_text(value)
    except ValueError:  # no finite decimal form
        return str(value)


def with_interval(correct: int, rows: int) -> dict[str, float]:
    """A share with its 95 % Wilson interval."""
    interval = binomtest(correct, rows).proportion_ci(method="wilson")
    return {"correct": correct, "accuracy": correct / rows, "low": float(interval.low), "high": float(interval.high)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="name shown for it: a run, or baseline")
    parser.add_argument("--model", type=Path, required=True, help="model folder with its model.json")
    parser.add_argument("--data", type=Path, required=True, help="prepared questions, data/<id>")
    parser.add_argument("--out", type=Path, required=True, help="results/<run>")
    parser.add_argument(
        "--settings", type=json.loads, required=True, help="scale, prompt, engine and evaluation sections, as JSON"
    )
    args = parser.parse_args()
    with errors_for_people():
        evaluate(args.settings, args.run, args.model, args.data, args.out)
