"""What can happen to the hand-written training on a real card, really done to it: other programs take the memory.

Skipped without an NVIDIA GPU of 20 GiB; with one that is idle it takes some minutes: pytest tests/test_card.py
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_trainers import metrics

from benchmarks import random_model
from scripts.memory import GIB
from scripts.settings import run_settings

ROOT = Path(__file__).parents[1]
# Not by mem_get_info: that would set up CUDA in pytest's own process.
CARD = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 0.0
STEPS = 4
TRAINER = "scripts.grpo_scratch.train"

pytestmark = [
    pytest.mark.skipif(CARD < 20, reason="needs an NVIDIA GPU of 20 GiB"),
    pytest.mark.timeout(600),
]

# Another program that takes what is free on the card but for some GiB, again and again, until it is killed.
GREEDY = """
import sys
import torch

torch.zeros(1, device="cuda")
print("ready", flush=True)
left, taken = float(sys.stdin.readline()) * 2**30, []
while True:
    more = int(torch.cuda.mem_get_info()[0] - left) >> 21 << 21  # CUDA hands out 2 MiB at a time
    if more > 2**26:
        try:
            taken.append(torch.empty(more, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            continue  # the training was quicker
        print("taken", flush=True)
"""


@contextmanager
def greedy() -> Iterator[Callable[[float], None]]:
    """greedy()(left): from now on another program leaves `left` GiB of the card."""
    process = subprocess.Popen(
        [sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stdout.readline() == "ready\n"

    def take_all_but(left: float) -> None:
        assert process.stdin and process.stdout
        process.stdin.write(f"{left}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "taken\n"

    try:
        yield take_all_but
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory) -> Path:
    """Qwen3-0.6B with four of its 28 layers and random weights: small, but its activations fill gigabytes."""
    folder = tmp_path_factory.mktemp("models") / "random"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_model.SHAPE, "num_hidden_layers", 4)
        random_model.make(demo_model, folder)
    return folder


@pytest.fixture
def training(model, demo_data, settings, tmp_path):
    """training(...) starts it by these settings, goes on from its last checkpoint, and has rewards by chance."""

    @contextmanager
    def start(grpo: dict, engine: dict) -> Iterator[SimpleNamespace]:
        run = run_settings(settings, "scratch")
        run["grpo"] |= {
            "steps": STEPS, "prompts_per_step": 8, "group_size": 8, "max_completion_tokens": 256, "evaluate_every": 0,
            "precision": "bf16", "learning_rate": 1e-6, **grpo,
        }  # fmt: skip
        run["engine"] |= {"name": "vllm", **engine}
        command = [sys.executable, "-m", "benchmarks.chance", TRAINER, "--run", "scratch", "--out", "out"]
        command += ["--model", str(model), "--data", str(demo_data), "--checkpoint-every", "2"]
        log = tmp_path / f"said-{time.monotonic_ns()}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, "--settings", json.dumps(run)], cwd=tmp_path, stdout=file, stderr=file,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

        def said() -> str:
            return log.read_text(encoding="utf-8", errors="replace")

        def wait_for(text: str) -> None:
            while text not in said():
                assert process.poll() is None, said()
                time.sleep(0.01)

        def ended(expected: int) -> str:
            code = process.wait()
            print(said())  # for who looks at what a person would see: pytest -rP
            assert code == expected and "Traceback" not in said(), said()
            return said()

        try:
            yield SimpleNamespace(wait_for=wait_for, ended=ended)
        finally:
            process.kill()
            process.wait()

    return start


# The policy holds 2.5 GiB. A step takes some 6 more with all activations of 16,384 tokens, and up to 4 with the smaller
# settings.
LARGE = {"max_tokens_per_micro_batch": 16384, "gradient_checkpointing": False}
SMALL = {"max_tokens_per_micro_batch": 4096, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("grpo", "memory_gib", "left", "why"),
    [
        pytest.param(
            LARGE, 4.0, 1.0, "The GPU's memory is full: lower grpo.max_tokens_per_micro_batch or engine.memory_gib",
            id="no room to learn",
        ),
        pytest.param(SMALL, 12.0, 6.0, "the engine could not wake up", id="no room to wake"),
    ],
)  # fmt: skip
def test_memory_that_another_program_takes_costs_the_step(training, tmp_path, grpo, memory_gib, left, why):
    """The same command ends the run that was stopped, and the engine that sleeps in each step takes every push."""
    engine = {"memory_gib": memory_gib, "sleep": "always"}
    with greedy() as take_all_but, training(grpo, engine) as run:
        run.wait_for("step    2 ")
        take_all_but(left)
        assert why in run.ended(1)
    with training(grpo, engine) as run:
        said = run.ended(0)
    assert "going on from step 2 of 4" in said
    assert "engine asleep: " in said and "engine awake (weights): " in said and "engine awake (kv_cache): " in said
    rows = metrics(tmp_path / "out")
    assert rows["step"].tolist() == [1, 2, 3, 4]
    assert rows["grad_norm"].min() > 0 and rows["weights_moved"].min() > 0
    assert rows["logprob_difference"].max() < 0.05  # nats: bf16's rounding under random weights


def test_an_engine_larger_than_the_card_stops_at_the_start(training):
    with training(SMALL, {"memory_gib": CARD + 10}) as run:
        assert f"engine.memory_gib: the engine was to take {CARD + 10:g} GiB" in run.ended(1)


def test_a_second_program_on_the_card_is_named_at_the_start(training):
    with greedy() as take_all_but:
        take_all_but(3.0)
        with training(SMALL, {"memory_gib": 4.0}) as run:
            said = run.ended(1)
    assert "engine.memory_gib: the engine was to take 4 GiB" in said and "end what else holds the GPU" in said


# Draws 21 completions twice: some tokens at once, and each token vLLM's own way. One token in 300 ends a completion.
DRAWN_TWICE = """
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from vllm.v1.worker.gpu.sample import sampler
from scripts.grpo_scratch import scheduler
from scripts.grpo_scratch.rollout import Sampling, build_engine

vllms_scores, further, taken = sampler.compute_topk_scores, scheduler.further_tokens, []
scheduler.further_tokens = lambda *args: (taken.append(args[3]), further(*args))[1]
engine = build_engine(Path(sys.argv[1]), SimpleNamespace(name="vllm", memory_gib=6.0), 300, 24, "bf16")
engine._stop = list(range(0, 151936, 300))
prompts = [[7 + n] * (5 + 20 * n) for n in range(7)]

def draw(sampling):
    engine._llm.reset_prefix_cache()  # so that prompts are computed in the same shapes
    return [completion for group in engine.generate(prompts, sampling) for completion in group]

manager, scores = engine._runner.cudagraph_manager, sampler.compute_topk_scores
for settings in ({"temperature": 0.0}, {"temperature": 0.7}, {}, {"top_p": 0.9, "top_k": 50}):
    sampling = Sampling(3, 150, seed=4, **settings)
    taken.clear()
    ours, at_once = draw(sampling), sum(taken)
    hook = vars(manager).pop("run_fullgraph")  # what vLLM replays goes unseen
    sampler.compute_topk_scores = vllms_scores
    theirs = draw(sampling)
    manager.run_fullgraph, sampler.compute_topk_scores = hook, scores
    pairs = [pair for x, y in zip(ours, theirs) for pair in zip(x.logprobs, y.logprobs)]
    print(json.dumps({
        "at_once": at_once,
        "at_once_theirs": sum(taken) - at_once,
        "ended": sum(not completion.truncated for completion in ours),
        "same": [x.token_ids for x in ours] == [y.token_ids for y in theirs],
        "difference": max(abs(p - q) for p, q in pairs),
    }), flush=True)
"""


def test_tokens_drawn_at_once_are_those_that_vllm_draws_one_by_one(model):
    """For 21 sequences vLLM replays a graph of 24, so there are rows that belong to none; later on fewer are left."""
    done = subprocess.run([sys.executable, "-c", DRAWN_TWICE, str(model)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"at_once"')]
    assert len(drawn) == 4
    for each in drawn:
        print(each)
        assert each["same"] and each["difference"] < 1e-4  # nats
        assert each["at_once"] > 50 and each["at_once_theirs"] == 0
    assert sum(each["ended"] for each in drawn) > 4
