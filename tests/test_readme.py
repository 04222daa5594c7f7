"""The README says what is so: its rerun table is the one tested, in both languages, and its files exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = ["README.md", "README.zh.md"]


@pytest.mark.parametrize("readme", READMES)
def test_every_file_and_picture_that_it_names_exists(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    named = re.findall(r"`((?:scripts|workflow|rules|reports|tests|requirements)/[\w./-]*)`", text)
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    pip = re.findall(r"-[rc] (\S+)", text)
    assert named and linked and pip
    assert [path for path in {*named, *linked, *pip} if not (ROOT / path).exists()] == []


def test_both_languages_show_the_same_commands_and_figures():
    texts = [(ROOT / readme).read_text(encoding="utf-8") for readme in READMES]
    blocks = [re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) for text in texts]
    commands = [
        [
            line.split("#")[0].strip()
            for language, block in found
            if language != "mermaid"
            for line in block.splitlines()
        ]
        for found in blocks
    ]
    assert "snakemake smoke" in commands[0]
    assert commands[0] == commands[1]
    figures = [sorted(re.findall(r"\d+\.\d+ %|\d+\.\d+ GB|\d+ GiB", text)) for text in texts]
    assert figures[0] == figures[1]
