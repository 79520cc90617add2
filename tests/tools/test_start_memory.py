"""`tools/bench/start_memory.py` builds and saves a run in parts, at toy size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/bench/start_memory.py"


@pytest.mark.slow
def test_each_process_says_what_its_start_and_a_save_needed(forks: None) -> None:
    command = [sys.executable, TOOL, "--hidden-size", "64", "--layers", "1"]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"rank (\d): own part \d+ MiB of \d+ MiB.*; start \d+ MiB, .*; save \d+ MiB", done.stdout)
    assert sorted(found) == ["0", "1"], done.stdout
