"""Prompts fit into the model, whatever tokenizer and context it has; what does not fit is named."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scripts.prepared import ModelFilesError
from scripts.prompts import longest_sequence, prompt_text, within_context
from scripts.settings import SettingsError

QUESTIONS = [{"id": "train-00000", "question": "2 + 2?"}, {"id": "train-00007", "question": "3 apples and 4 apples?"}]


@pytest.fixture
def model(demo_model, tmp_path) -> Path:
    """The demo's model, to be changed."""
    return shutil.copytree(demo_model, tmp_path / "model")


def change(path: Path, **values) -> None:
    """Set these keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text(encoding="utf-8")), **values}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), encoding="utf-8")


def longest(model: Path, questions=QUESTIONS, max_completion_tokens=40) -> int:
    return longest_sequence(model, AutoTokenizer.from_pretrained(model), questions, "", max_completion_tokens)


def test_a_model_that_thinks_is_told_not_to(model):
    """Qwen3's template thinks unless it is told otherwise."""
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}|{{ enable_thinking | default(true) }}")
    assert prompt_text(AutoTokenizer.from_pretrained(model), "2 + 2?", "Think.") == "2 + 2?\nThink.|False"


def test_the_longest_sequence_is_the_longest_prompt_and_a_whole_completion(model):
    prompt = prompt_text(AutoTokenizer.from_pretrained(model), QUESTIONS[1]["question"], "")
    assert longest(model) == len(AutoTokenizer.from_pretrained(model).encode(prompt)) + 40


def test_a_completion_that_does_not_fit_into_the_context_is_said_with_the_most_that_does(model):
    most = 256 - longest(model, max_completion_tokens=0)
    assert longest(model, max_completion_tokens=most) == 256
    with pytest.raises(
        SettingsError, match=rf"max_completion_tokens: 250 .*\(256 tokens\); lower it to at most {most}"
    ):
        longest(model, max_completion_tokens=250)


def test_a_prompt_that_fills_the_context_is_named(model):
    questions = [*QUESTIONS, {"id": "train-00042", "question": 300 * "apple "}]
    with pytest.raises(
        SettingsError, match=r"train-00042: the prompt alone has \d{3,} tokens, the context .* 256; take"
    ):
        longest(model, questions)


def test_what_is_too_long_for_the_model_is_named_and_not_trained_on(model, capsys):
    tokenizer = AutoTokenizer.from_pretrained(model)
    long = [{"id": f"train-{i:05}", "question": 300 * "apple "} for i in range(12)]
    assert within_context(model, tokenizer, [long[0], *QUESTIONS, *long[1:]], "") == QUESTIONS
    said = capsys.readouterr().out
    assert said.startswith(f"12 of {12 + len(QUESTIONS)} questions are not trained on, as the prompt alone fills the")
    assert "(256 tokens): train-00000, train-00001, " in said and said.endswith("train-00009, ...\n")
    assert within_context(model, tokenizer, QUESTIONS, "") == QUESTIONS
    assert within_context(model, tokenizer, long, "") == long  # which `longest_sequence` then stops at
    assert capsys.readouterr().out == ""


def test_a_model_without_a_bound_takes_any_length(model, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(model)
    monkeypatch.setattr("scripts.prompts.AutoConfig.from_pretrained", lambda folder: object())
    assert longest_sequence(model, tokenizer, QUESTIONS, "", 100_000) > 100_000


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(model):
    change(model / "tokenizer_config.json", pad_token=None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.pad_token_id is None
    longest_sequence(model, tokenizer, QUESTIONS, "", 40)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_a_tokenizer_that_ends_nothing_is_refused(model):
    change(model / "tokenizer_config.json", pad_token=None, eos_token=None)
    with pytest.raises(ModelFilesError, match=r"names no eos_token; set it in its tokenizer_config\.json"):
        longest(model)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('A system message is needed') }}", "A system message is needed"),
        ("{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),  # a template runs in a sandbox
    ],
)
def test_a_chat_template_that_fails_is_said(model, template, said):
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelFilesError, match=rf"chat template of .*model does not take one message of a user: {said}"):
        longest(model)


def test_an_architecture_that_transformers_does_not_know_is_said(model):
    change(model / "config.json", model_type="unheard_of")
    with pytest.raises(ModelFilesError, match=r"model cannot be loaded: .*`unheard_of`"):
        longest(model)
