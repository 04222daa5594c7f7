"""What a training will need on a GPU, and what follows from it. Figures by hand; the GPU is made up."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3Config, GPT2Config, Qwen3Config

from scripts import memory
from scripts.memory import GIB, engine_sleeps, peak, predict, sizes
from scripts.settings import SettingsError

ENGINE = SimpleNamespace(name="auto", sleep="auto", memory_gib=6.0)


def grpo(**changes) -> SimpleNamespace:
    full = {
        "weights_dtype": "fp32", "precision": "bf16", "lora_rank": 0, "beta": 0.0, "gradient_checkpointing": True,
        "max_tokens_per_micro_batch": 4096, "sync_every": 1,
    }  # fmt: skip
    return SimpleNamespace(**full | changes)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """Qwen3-0.6B's config.json; no weights are needed."""
    folder = tmp_path_factory.mktemp("shape")
    Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_the_ledger_of_a_full_fine_tune_by_hand(shape):
    """596,049,920 parameters (huggingface.co/Qwen/Qwen3-0.6B) in fp32: 2.22 GiB, twice that for AdamW's moments."""
    parts = predict(shape, grpo(), 6.0, logits=2**27)
    weights = 4 * 596_049_920 / GIB
    assert parts["weights"] == parts["gradients"] == pytest.approx(weights)
    assert parts["optimizer"] == pytest.approx(2 * weights)
    assert parts["reference"] == 0 and parts["engine"] == 6.0
    # 10 bytes a number, and 8 for each of 151,936 x 1,024 weights of the vocabulary
    assert parts["logits"] == pytest.approx(1.25 + 8 * 151_936 * 1024 / GIB)
    # the inputs of 28 layers and three more tensors of that size; a layer is smaller than the logits
    assert parts["activations"] == pytest.approx(4096 * 31 * 4096 / GIB)
    everything = sum(parts.values())
    assert peak(parts, sleeps=False) == pytest.approx(everything)
    assert peak(parts, sleeps=True) == pytest.approx(max(everything - 5.5, 3 * weights + 8.3))


def test_what_the_ledger_follows(shape):
    plain = predict(shape, grpo(), 6.0, 0)
    assert predict(shape, grpo(beta=0.1), 6.0, 0)["reference"] == plain["weights"]
    lora = predict(shape, grpo(lora_rank=8, beta=0.1), 6.0, 0)
    assert lora["gradients"] == lora["optimizer"] == lora["reference"] == 0
    assert lora["logits"] == pytest.approx(2 * 151_936 * 1024 / GIB)  # the vocabulary does not learn
    assert predict(shape, grpo(weights_dtype="bf16"), 6.0, 0)["optimizer"] == plain["optimizer"] / 2
    layer = 8 * 3072 + 26 * 1024 + 10 * (2048 + 1024)  # bytes a token
    free = predict(shape, grpo(gradient_checkpointing=False), 6.0, 0)
    assert free["activations"] == pytest.approx((28 * 4096 * layer + 2 * 596_049_920) / GIB)  # and bf16 copies
    assert free["logits"] == pytest.approx(6 * 151_936 * 1024 / GIB)
    # one layer of checkpointing, where it is larger than the logits
    large = predict(shape, grpo(max_tokens_per_micro_batch=65536), 6.0, 0)
    assert large["activations"] + large["logits"] == pytest.approx(65536 * (layer + 31 * 4096) / GIB)


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "engine_gib", "measured"),
    [
        (16384, True, 6.0, {"activations": 1.92, "logits": 2.44, "total": 16.11}),
        (12288, True, 6.0, {"activations": 1.44, "logits": 2.43, "total": 15.48}),
        (16384, False, 20.0, {"activations": 36.06, "logits": 2.15, "total": 69.36}),
    ],
)
def test_the_ledger_meets_what_an_h200_measured(shape, tokens, checkpointing, engine_gib, measured):
    """Manifests of November 2026, see benchmarks/README.md; the engine slept where layers were checkpointed."""
    cfg = grpo(max_tokens_per_micro_batch=tokens, gradient_checkpointing=checkpointing)
    parts = predict(shape, cfg, engine_gib, logits=2**27)
    found = parts | {"total": peak(parts, sleeps=checkpointing)}
    assert {name: found[name] for name in measured} == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("config", [GPT2Config(n_layer=2), Gemma3Config()], ids=["gpt2", "gemma3, text and images"])
def test_models_of_other_shapes_have_a_ledger_too(tmp_path, config):
    config.save_pretrained(tmp_path)
    assert predict(tmp_path, grpo(), 6.0, 0)["activations"] > 0


def gpu(monkeypatch, free: float):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * GIB), int(32 * GIB)))


PARTS = {"weights": 2.0, "gradients": 2.0, "optimizer": 4.0, "reference": 0.0, "activations": 3.0, "logits": 1.0,
         "engine": 6.0, "CUDA": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "free", "sleeps"),
    [("auto", 24, False), ("auto", 19.1, False), ("auto", 18.9, True), ("always", 24, True), ("never", 12, False)],
)
def test_the_engine_sleeps_where_memory_asks_for_it(monkeypatch, capsys, asked, free, sleeps):
    gpu(monkeypatch, free)
    engine = SimpleNamespace(name="auto", sleep=asked)
    assert engine_sleeps(engine, grpo(), PARTS) == sleeps
    said = capsys.readouterr().out
    assert said.startswith(
        "memory: weights 2.0 + gradients 2.0 + optimizer 4.0 + activations 3.0 + logits 1.0 + engine 6.0 + CUDA 1.0 = "
        f"19.0 GiB predicted, {free:.1f} free. The engine "
    )
    assert ("The engine sleeps while the policy learns: 13.5 " in said) == sleeps
    assert said.endswith(f"(engine.sleep: {asked})\n")


def test_an_engine_that_is_not_pushed_to_each_step_stays_awake(monkeypatch):
    """Asleep it forgets its weights."""
    gpu(monkeypatch, 10)
    assert not engine_sleeps(SimpleNamespace(name="vllm", sleep="always"), grpo(sync_every=0), PARTS)


def test_without_a_gpu_nothing_sleeps(capsys):
    assert not engine_sleeps(SimpleNamespace(name="vllm", sleep="always"), grpo(), PARTS)
    assert capsys.readouterr().out == "" and memory.in_use() == 0.0


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_keeps_what_sleep_frees_is_named(monkeypatch, name):
    gpu(monkeypatch, 10)
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(
        SettingsError, match=r"engine.sleep: with expandable_segments:True a sleeping engine may free nothing"
    ):
        engine_sleeps(ENGINE, grpo(), PARTS)
    gpu(monkeypatch, 30)
    assert not engine_sleeps(ENGINE, grpo(), PARTS)  # nothing sleeps, nothing is wrong


def test_sizes_are_those_of_the_tensors():
    model = torch.nn.Linear(2**10, 2**8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2**10)).sum().backward()
    optimizer.step()
    mib = sizes(model, optimizer, reference=model)
    assert {name: round(2**10 * gib, 3) for name, gib in mib.items()} == {
        "weights": 1.0, "gradients": 1.0, "optimizer": 2.0, "reference": 1.0
    }  # fmt: skip
