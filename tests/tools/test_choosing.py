"""The table of choices in the documentation is what `tools/choosing.py` makes."""

from __future__ import annotations

import re

import pytest
from tool_modules import load_tool

choosing = load_tool("choosing")
ROWS = re.findall(r"^\| \d.*$", choosing.PAGE.read_text(encoding="utf-8"), re.M)


def test_the_page_has_a_row_for_every_case_and_says_that_times_are_predictions() -> None:
    assert len(ROWS) == len(choosing.FAMILIES) * len(choosing.CORPORA) * len(choosing.MACHINES)
    assert choosing.HEAD.format(hours=choosing.HOURS) in choosing.PAGE.read_text(encoding="utf-8")


def test_a_row_is_what_the_code_chooses_today() -> None:
    assert choosing.row("10 MB", 1e7, "h200", 1, "encoder") in ROWS


@pytest.mark.nightly
def test_the_page_is_what_the_tool_writes() -> None:
    assert "\n".join(choosing.page()).rstrip() + "\n" == choosing.PAGE.read_text(encoding="utf-8")
