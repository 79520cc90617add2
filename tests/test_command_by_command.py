"""docs/coming-from/command-by-command.md: its commands are parsed with all their options, and its tests exist."""

from __future__ import annotations

import re
import shlex

import pytest
from documented_commands import ROOT, check_command, find_command

PAGE = ROOT / "docs" / "coming-from" / "command-by-command.md"
COMMANDS = {
    "A GPT by Megatron-DeepSpeed, from YAML files": 9, "A GPT-J on SageMaker": 5,
    "A GPT in five steps, tuned on instructions": 63, "language-pretraining": 5, "A Llama by Megatron-LM": 3,
}  # fmt: skip
"""The commands of each README, in the order of the page."""


def rows() -> list[tuple[str, str, str, str]]:
    """(heading, theirs, ours, note) of every row."""
    found, heading = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] not in ("There", "---"):
            found.append((heading, *cells))
    return found


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_command_of_a_readme_has_its_row_once() -> None:
    theirs: dict[str, list[str]] = {heading: [] for heading in COMMANDS}
    for heading, there, _, _ in rows():
        theirs[heading] += codes(there)
    assert {heading: len(set(found)) for heading, found in theirs.items()} == COMMANDS
    assert {heading: len(found) for heading, found in theirs.items()} == COMMANDS


@pytest.mark.parametrize(("there", "ours", "note"), [each[1:] for each in rows()])
def test_what_stands_in_its_place_is_parsed_and_tested(there: str, ours: str, note: str) -> None:
    for text in codes(ours):
        check_command(text)
        command, words = find_command(shlex.split(text)[1:])
        command.make_context(text, words)  # typer's own reading: types, choices, what is missing
    tests = [each.split("::") for each in codes(note) if "::" in each]
    assert bool(tests) == bool(codes(ours)), there
    for file, name in tests:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
