"""Who samples: both engines against transformers and against the trainer's own log-probs."""

import copy
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scripts.cli import RunStopped
from scripts.grpo_scratch.grpo import collate, sequence_logprobs
from scripts.grpo_scratch.rollout import (
    Draws,
    Sampling,
    build_engine,
    engine_start_for_people,
    rollout,
    stop_token_ids,
    sync_weights_to_vllm,
)
from scripts.memory import GIB
from scripts.prepared import ModelFilesError, read_rows
from scripts.settings import SettingsError

MAX_TOKENS = 24
CPU = torch.device("cpu")
# Two fp32 programs for one function: 1e-7 to 4e-5 nats a token were seen. Weights left behind differ by more than 1e-3.
NOISE = 1e-4
ONLY_VLLM = pytest.mark.parametrize("engine", ["vllm"], indirect=True)


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


# The engine as a training uses it on a card where both do not fit. vLLM's sleep frees nothing on a CPU; what is called,
# and in which order, is the same.


@pytest.fixture
def calls(engine, monkeypatch):
    """What vLLM is asked to do, in order."""
    done = []

    def recorded(owner, name, shown):
        was = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (done.append(shown(**k)), was(*a, **k))[1])

    recorded(engine._llm, "sleep", lambda level: f"sleep {level}")
    recorded(engine._llm, "wake_up", lambda tags: f"wake {tags[0]}")
    recorded(engine._llm, "reset_prefix_cache", lambda: "reset")
    recorded(engine._runner, "reload_weights", lambda weights_iterator: "load")
    monkeypatch.setattr(engine, "_sleeps", True)
    return done


@ONLY_VLLM
def test_a_push_after_sleep_brings_the_new_weights_again_and_again(engine, model, tokenizer, questions, calls):
    """Memory for the weights, the weights, and only then memory for keys and values, which must start empty."""
    for push in (1, 2, 3):
        assert difference(model, engine, tokenizer, questions) < NOISE
        engine.sleep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.std() * noise(parameter, push)
        sync_weights_to_vllm(model, engine)
        assert calls == ["sleep 2", "wake weights", "load", "reset", "wake kv_cache"]
        calls.clear()
        assert difference(model, engine, tokenizer, questions) < NOISE


@ONLY_VLLM
def test_an_engine_that_does_not_take_a_push_ends_the_run(engine, model, calls, monkeypatch):
    monkeypatch.setattr(engine._runner, "reload_weights", lambda weights_iterator: list(weights_iterator))
    sync_weights_to_vllm(model, engine)  # the same weights: nothing is lost
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1.001)
    with pytest.raises(
        RunStopped, match=r"the engine did not take the push: its model.norm.weight is not the trainer's"
    ):
        sync_weights_to_vllm(model, engine)


@ONLY_VLLM
def test_a_sleep_that_frees_nothing_ends_the_run(engine, model, calls, monkeypatch):
    """Looked at once: later on another program may take what was freed."""
    monkeypatch.setattr(engine, "gib", 5.0)
    monkeypatch.setattr(engine, "_said", False)
    with pytest.raises(RunStopped, match=r"the sleeping engine freed 0.0 of its 5.0 GiB.*unset PYTORCH_ALLOC_CONF"):
        engine.sleep()
    sync_weights_to_vllm(model, engine)
    engine.sleep()
    sync_weights_to_vllm(model, engine)


@ONLY_VLLM
def test_an_engine_that_cannot_wake_says_what_to_lower(engine, model, calls, monkeypatch):
    engine.sleep()
    wake = engine._llm.wake_up

    def full(tags):
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:139")

    monkeypatch.setattr(engine._llm, "wake_up", full)
    with pytest.raises(RunStopped, match=r"could not wake up.*Lower engine.memory_gib; the same command goes on"):
        sync_weights_to_vllm(model, engine)
    monkeypatch.setattr(engine._llm, "wake_up", wake)
    sync_weights_to_vllm(model, engine)


def test_an_engine_larger_than_what_is_free_names_the_setting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(3.1 * GIB), int(31.4 * GIB)))
    for too_much in (6.0, 160.0):
        said = (
            f"engine.memory_gib: the engine was to take {too_much:g} GiB, and 3.1 were free. Lower it, or end what else"
        )
        with pytest.raises(SettingsError, match=said):
            with engine_start_for_people(too_much):
                pytest.fail("the engine was started")
    with engine_start_for_people(3.0):
        pass


@pytest.mark.parametrize(
    ("vllm_said", "said"),
    [  # vLLM 0.26, gpu_worker.py and kv_cache_utils.py
        (
            ValueError("Free memory on device cuda:0 (3.1/31.4 GiB) on startup is less than desired GPU memory "
                       "utilization (0.19, 6.0 GiB). Decrease GPU memory utilization or reduce it"),
            "the engine was to take 6 GiB, and .* were free. Lower it, or end what else holds the GPU",
        ),
        (
            ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
            "6 GiB hold the weights, but not the keys and values of one sequence. Raise it",
        ),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_fit_names_the_setting(vllm_said, said):
    with pytest.raises(SettingsError, match=f"engine.memory_gib: {said}"):
        with engine_start_for_people(6.0):
            raise vllm_said
    with pytest.raises(ValueError, match="something else"):
        with engine_start_for_people(6.0):
            raise ValueError("something else")


# The shortcut through vLLM's scheduler


@pytest.fixture
def steady(monkeypatch):
    """How many tokens each step took that went the shortcut."""
    module = pytest.importorskip("scripts.grpo_scratch.scheduler")
    scheduler, taken = module.RolloutScheduler, []
    schedule = scheduler.schedule

    def recorded(self, *args, **kwargs):
        step = schedule(self, *args, **kwargs)
        if isinstance(step, module.SteadyStep):
            taken.append(step.tokens)
        return step

    monkeypatch.setattr(scheduler, "schedule", recorded)
    return SimpleNamespace(scheduler=scheduler, taken=taken)


@ONLY_VLLM
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("of_each", [4, 20])  # 24 completions decode together; of 120 some wait for others to end
def test_the_shortcut_changes_no_completion(engine, tokenizer, questions, steady, monkeypatch, of_each, logprobs):
    sampling = Sampling(of_each, MAX_TOKENS, logprobs=logprobs, seed=3)
    short = [s.completion for s in rollout(engine, tokenizer, questions, "", sampling)]
    assert sum(steady.taken) > MAX_TOKENS / 4 and max(steady.taken) > 1
    monkeypatch.setattr(steady.scheduler, "_tokens_ahead", lambda self: 0)
    assert [s.completion for s in rollout(engine, tokenizer, questions, "", sampling)] == short


def test_on_a_gpu_the_tokens_of_a_step_are_launched_before_any_is_waited_for():
    """vLLM's GPU runner hands out what is still on its way; here 10, 11, 12 for a and 20, 21, 22 for b."""
    module = pytest.importorskip("scripts.grpo_scratch.scheduler")
    events, last = [], SimpleNamespace()

    class OnItsWay(module.AsyncModelRunnerOutput):
        def __init__(self, token):
            self.token = token

        def get_output(self):
            events.append(f"wait {self.token}")
            logprobs = SimpleNamespace(logprobs=-torch.tensor([[0.5], [0.25]]).numpy() * self.token)
            return SimpleNamespace(sampled_token_ids=[[10 + self.token], [20 + self.token]], logprobs=logprobs)

    def launch(step):
        cached = step.scheduled_cached_reqs
        events.append((cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids))
        last.token = cached.num_output_tokens[0] - 1

    runner = SimpleNamespace(
        execute_model=launch, sample_tokens=lambda grammar: OnItsWay(last.token), attn_groups=[]
    )  # fmt: skip
    module.take_several(runner)
    step = module.SteadyStep.make_empty()
    step.tokens = 3
    step.scheduled_cached_reqs = module.CachedRequestData(["a", "b"], set(), [], {}, [([7],), None], [5, 9], [1, 4])
    runner.execute_model(step)
    output = runner.sample_tokens(None)
    assert events == [
        ([5, 9], [1, 4], [([7],), None]),
        ([6, 10], [2, 5], [None, None]),
        ([7, 11], [3, 6], [None, None]),
    ]
    drawn = output.get_output()
    assert drawn.sampled_token_ids == [[10, 11, 12], [20, 21, 22]]
    assert drawn.drawn == [[0.0, -0.5, -1.0], [0.0, -0.25, -0.5]]
    step.__class__ = module.SchedulerOutput  # a step of vLLM's own stays as it is
    runner.execute_model(step)
    assert isinstance(runner.sample_tokens(None), OnItsWay)


class DefaultModelState(SimpleNamespace):
    """vLLM's name for a model without anything of its own between two tokens."""


@pytest.mark.parametrize(
    ("graph", "model", "images", "attention", "expected"),
    [
        pytest.param(True, {}, False, "FLASH_ATTN", ["graph", "2 further"], id="a graph of the whole model"),
        pytest.param(False, {}, False, "FLASH_ATTN", ["token"] * 3, id="no graph for so many sequences"),
        pytest.param(True, {"rope_state": "M-RoPE"}, False, "FLASH_ATTN", ["graph"] * 3, id="positions of its own"),
        pytest.param(True, {}, True, "FLASH_ATTN", ["graph"] * 3, id="a model for images"),
        pytest.param(
            True, {}, False, "FLASHINFER", ["graph", "wait", "graph", "wait", "graph"], id="plans on the host"
        ),
    ],
)
def test_only_what_changes_is_launched_again_where_that_is_all(monkeypatch, graph, model, images, attention, expected):
    """A step of three tokens, twice: by one graph and what comes before and after it, or each the whole way."""
    module = pytest.importorskip("scripts.grpo_scratch.scheduler")
    launched = []
    stream = SimpleNamespace(synchronize=lambda: launched.append("wait"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(module, "score_sampled_tokens_alone", lambda: None)
    monkeypatch.setattr(module, "further_tokens", lambda _, batch, shape, count: launched.append(f"{count} {batch}"))
    monkeypatch.setattr(module.SteadyOutput, "get_output", lambda self: None)
    manager = SimpleNamespace(run_fullgraph=lambda shape: launched.append("graph"))
    backend = SimpleNamespace(get_name=lambda: attention)
    runner = SimpleNamespace(
        execute_model=lambda step: manager.run_fullgraph("24 sequences") if graph else launched.append("token"),
        sample_tokens=lambda: None, postprocess_sampled=None, supports_mm_inputs=images, cudagraph_manager=manager,
        execute_model_state=SimpleNamespace(input_batch="further"), attn_groups=[[SimpleNamespace(backend=backend)]],
        model_state=DefaultModelState(**{"rope_state": None, **model}),
    )  # fmt: skip
    module.take_several(runner)
    step = module.SteadyStep.make_empty()
    step.tokens = 3
    for _ in range(2):
        runner.execute_model(step)
        runner.sample_tokens()
    assert launched == expected * 2
    graph, step.tokens = False, 2  # what was replayed once is no graph of the next step
    launched.clear()
    runner.execute_model(step)
    runner.sample_tokens()
    assert [each for each in launched if each != "wait"] == ["token"] * 2


@ONLY_VLLM
def test_without_memory_for_everything_vllm_decides_step_by_step(engine, tokenizer, questions, steady, monkeypatch):
    sampling = Sampling(4, MAX_TOKENS, seed=3)
    short = [s.completion for s in rollout(engine, tokenizer, questions, "", sampling)]
    steady.taken.clear()
    pool = engine._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    enough = pool.get_num_free_blocks
    monkeypatch.setattr(steady.scheduler, "_reserve", with_few_blocks(steady.scheduler._reserve, pool, enough))
    assert [s.completion for s in rollout(engine, tokenizer, questions, "", sampling)] == short
    assert not steady.taken


def with_few_blocks(reserve, pool, enough):
    def reserved(scheduler):
        pool.get_num_free_blocks = lambda: 3
        try:
            return reserve(scheduler)
        finally:
            pool.get_num_free_blocks = enough

    return reserved


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
    both, sampling = [], Sampling(4, MAX_TOKENS, temperature=0.8, top_p=0.9, top_k=40, seed=5)
    for name in ("vllm", "transformers"):
        engine = build_engine(demo_model, SimpleNamespace(name=name, memory_gib=1.0), 256, 64, "fp32")
        both.append(rollout(engine, tokenizer, questions, "", sampling))
        engine.close()
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
