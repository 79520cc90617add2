"""`tools/bench/step_profile.py` says where the time of a CPU step goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "step_profile.py"


@pytest.mark.nightly
def test_products_are_most_of_a_step() -> None:
    command = [sys.executable, TOOL, "bert", "llama", "--steps", "2", "--vocabulary", "2000"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(line.split(": products ") for line in ran.stdout.splitlines() if ": products " in line)
    assert list(found) == ["bert", "llama"] and all(float(text.partition("%")[0]) > 30 for text in found.values())
