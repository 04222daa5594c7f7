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
    blocks = [re.findall(r"```(?!mermaid)\w*\n(.*?)```", (ROOT / r).read_text(encoding="utf-8"), re.S) for r in READMES]
    commands = [[[line.split("#")[0].strip() for line in block.splitlines()] for block in found] for found in blocks]
    assert commands[0] == commands[1]
    figures = [
        sorted(re.findall(r"\d+\.\d+ %|\d+\.\d+ GB|\d+ GiB", (ROOT / r).read_text(encoding="utf-8"))) for r in READMES
    ]
    assert figures[0] == figures[1]
