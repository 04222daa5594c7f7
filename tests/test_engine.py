"""Who samples: both engines against transformers and against the trainer's own log-probs."""

import copy
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scripts.grpo_scratch.grpo import collate, sequence_logprobs
from scripts.grpo_scratch.rollout import (
    Draws,
    Sampling,
    build_engine,
    rollout,
    stop_token_ids,
    sync_weights_to_vllm,
)
from scripts.prepared import ModelFilesError, read_rows

MAX_TOKENS = 24
CPU = torch.device("cpu")
# Two fp32 programs for one function: 1e-7 to 4e-5 nats a token were seen. Weights left behind differ by more than 1e-3.
NOISE = 1e-4


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def engine(request, demo_model):
    if request.param == "vllm" and not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed here")
    return build_engine(demo_model, SimpleNamespace(name=request.param, memory_gib=1.0), 256, 64, "fp32")


@pytest.fixture(scope="module")
def start_model(demo_model):
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture
def model(start_model, engine):
    """The trainer's model, in step with the engine before and after each test."""
    yield copy.deepcopy(start_model)
    sync_weights_to_vllm(start_model, engine)


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def questions(demo_data):
    return read_rows(demo_data / "train.jsonl")[:6]


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def difference(model, engine, tokenizer, questions, temperature: float = 1.0, instruction: str = "") -> float:
    """Mean |sampler - trainer| of the log-probs of fresh samples, in nats a token: what metrics.csv holds."""
    samples = rollout(engine, tokenizer, questions, instruction, Sampling(4, MAX_TOKENS, temperature))
    batch = collate(samples, torch.zeros(len(samples)), tokenizer.pad_token_id, CPU)
    with torch.no_grad():
        logprobs, _ = sequence_logprobs(model, batch, temperature)
    mask = batch.completion_mask
    assert batch.sampler_logprobs[mask].mean() < -0.1, "the samples are as good as certain: nothing to compare"
    return (batch.sampler_logprobs - logprobs)[mask].abs().mean().item()


def test_greedy_completions_are_those_of_transformers(engine, model, tokenizer, questions):
    samples = rollout(engine, tokenizer, questions, "", Sampling(1, MAX_TOKENS, temperature=0.0))
    for s in samples:
        ids = torch.tensor([s.prompt_ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
        )
        assert s.completion.token_ids == out[0, len(s.prompt_ids) :].tolist()
        assert s.text == tokenizer.decode(s.completion.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_on_logprobs(engine, model, tokenizer, questions, temperature):
    assert difference(model, engine, tokenizer, questions, temperature) < NOISE


# The embedding is the tied head as well, which a push to vLLM on a CPU once left behind.
WEIGHTS = ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight",
           "model.norm.weight"]  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_push_brings_changed_weights_into_the_engine_again_and_again(engine, model, tokenizer, questions, name):
    weight = model.get_parameter(name)
    for push in (1, 2):
        with torch.no_grad():
            weight += (0.2 if weight.dim() == 1 else 0.3 * weight.std()) * noise(weight, push)
        assert difference(model, engine, tokenizer, questions) > 10 * NOISE
        sync_weights_to_vllm(model, engine)
        assert difference(model, engine, tokenizer, questions) < NOISE


def test_prompts_cached_before_a_push_are_read_anew_after_it(engine, model, tokenizer, questions):
    """vLLM keeps keys and values of whole blocks of a prompt (128 tokens on a CPU), computed with the old weights."""
    instruction = "How many apples are left?\n" * 25
    assert difference(model, engine, tokenizer, questions, instruction=instruction) < NOISE
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * noise(parameter, 0)
    sync_weights_to_vllm(model, engine)
    assert difference(model, engine, tokenizer, questions, instruction=instruction) < NOISE


def test_pushed_weights_are_copies(engine, model, tokenizer, questions):
    """Training goes on in place; an engine that shared the trainer's memory would sample from half-made updates."""
    sync_weights_to_vllm(model, engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * noise(parameter, 0)
    assert difference(model, engine, tokenizer, questions) > 10 * NOISE


def test_a_completion_ends_with_its_end_token_or_is_truncated(engine, tokenizer, questions):
    samples = rollout(engine, tokenizer, questions, "", Sampling(16, 20))
    eos = tokenizer.eos_token_id
    assert {s.completion.truncated for s in samples} == {True, False}
    for s in samples:
        tokens = s.completion.token_ids
        assert len(tokens) == len(s.completion.logprobs)
        assert s.completion.truncated == (tokens[-1] != eos)
        assert eos not in tokens[:-1]
        if s.completion.truncated:
            assert len(tokens) == 20


def test_an_end_token_exactly_at_the_limit_is_no_truncation(engine, tokenizer, questions):
    greedy = rollout(engine, tokenizer, questions[:1], "", Sampling(1, 40, temperature=0.0))[0]
    length = len(greedy.completion.token_ids)
    assert greedy.completion.token_ids[-1] == tokenizer.eos_token_id
    at_limit = rollout(engine, tokenizer, questions[:1], "", Sampling(1, length, temperature=0.0))[0]
    assert at_limit.completion.token_ids == greedy.completion.token_ids
    assert not at_limit.completion.truncated
    cut = rollout(engine, tokenizer, questions[:1], "", Sampling(1, length - 1, temperature=0.0))[0]
    assert cut.completion.token_ids == greedy.completion.token_ids[:-1]
    assert cut.completion.truncated


def test_the_completions_of_a_question_stand_together(engine, tokenizer, questions):
    samples = rollout(engine, tokenizer, questions, "", Sampling(3, 5))
    assert [s.question["id"] for s in samples] == [q["id"] for q in questions for _ in range(3)]
    assert all(tokenizer.decode(s.prompt_ids).count(s.question["question"]) == 1 for s in samples)


def test_the_completions_of_a_question_differ(engine, tokenizer, questions):
    samples = rollout(engine, tokenizer, questions[:1], "", Sampling(16, MAX_TOKENS))
    assert len({tuple(s.completion.token_ids) for s in samples}) > 8


def test_completions_follow_from_prompt_and_seed_whatever_else_is_sampled(engine, tokenizer, questions):
    """So a step that is done again after a stop, or split over processes, samples the same again."""

    def sampled(questions, seed):
        samples = rollout(engine, tokenizer, questions, "", Sampling(4, MAX_TOKENS, seed=seed))
        return [s.completion.token_ids for s in samples]

    first = sampled(questions, 1)
    assert sampled(questions, 1) == first
    assert sampled(questions[2:4], 1) == first[8:16]
    assert sampled(questions, 2) != first


def test_both_engines_draw_the_same_completions(demo_model, tokenizer, questions):
    """On a CPU, where both take their random numbers from torch: two programs, one sampling."""
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed here")
    both = [
        rollout(
            build_engine(demo_model, SimpleNamespace(name=name, memory_gib=1.0), 256, 64, "fp32"),
            tokenizer, questions, "", Sampling(4, MAX_TOKENS, temperature=0.8, top_p=0.9, top_k=40, seed=5),
        )
        for name in ("vllm", "transformers")
    ]  # fmt: skip
    same = [ours.completion.token_ids == theirs.completion.token_ids for ours, theirs in zip(*both, strict=True)]
    assert sum(same) >= 22  # of 24: a tie that rounding decides may part two of them


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    draws = Draws(list(range(4000)), CPU)
    drawn = draws(torch.zeros(4000, 1), probabilities.log().expand(4000, 5)).argmax(-1)
    torch.testing.assert_close(drawn.bincount(minlength=5) / 4000, probabilities, atol=0.02, rtol=0)
    torch.testing.assert_close(draws.logprobs[0], probabilities.log()[drawn])


def test_top_k_of_one_is_greedy(engine, tokenizer, questions):
    greedy, only_best = (
        [s.completion.token_ids for s in rollout(engine, tokenizer, questions, "", sampling)]
        for sampling in (Sampling(1, MAX_TOKENS, temperature=0.0), Sampling(1, MAX_TOKENS, top_k=1))
    )
    assert greedy == only_best


@pytest.mark.parametrize("engine", ["transformers"], indirect=True)
def test_transformers_sampling_leaves_torchs_random_state_alone(engine, tokenizer, questions):
    """vLLM's does not: in its own process it draws from the global state."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    rollout(engine, tokenizer, questions, "", Sampling(2, 5))
    assert torch.equal(torch.rand(3), expected)


def test_a_model_may_name_several_end_tokens(tmp_path):
    GenerationConfig(eos_token_id=[151645, 151643]).save_pretrained(tmp_path)
    assert stop_token_ids(tmp_path) == [151645, 151643]
    GenerationConfig(eos_token_id=2).save_pretrained(tmp_path)
    assert stop_token_ids(tmp_path) == [2]
    GenerationConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelFilesError, match="names no eos_token_id"):
        stop_token_ids(tmp_path)
