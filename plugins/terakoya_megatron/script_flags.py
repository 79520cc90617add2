"""The options of pretrain_gpt.py in Megatron-LM and Megatron-DeepSpeed, with what each becomes: `MEGATRON_FLAGS.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["mapped", "ignored", "unsupported"]
OUTCOMES: Mapping[str | None, Outcome] = {None: "mapped", "ignored": "ignored", "not supported": "unsupported"}
ROW = re.compile(r"\| `--([^ `]+) ?([^`]*)` \| (?:`([^`]+)`|(ignored|not supported): (.+)) \|")


@dataclass(frozen=True)
class Flag:
    """One option.

    Attributes:
        outcome: the option is mapped to a key, can be ignored without loss, or is not supported.
        text: the key; or why the option is ignored, or what is not supported.
        sample: a value for tests of a mapped option; "" for a switch.
    """

    outcome: Outcome
    text: str
    sample: str = ""


def read_flags() -> dict[str, Flag]:
    """Returns the options of the page, under the names that the programs use."""
    text = Path(__file__).with_name("MEGATRON_FLAGS.md").read_text(encoding="utf-8")
    rows = [ROW.fullmatch(line) for line in text.splitlines() if line.startswith("| `--")]
    assert all(rows), "a row of another form"
    return {row[1]: Flag(OUTCOMES[row[4]], row[3] or row[5], row[2]) for row in rows if row is not None}


FLAGS: Mapping[str, Flag] = read_flags()
