"""The comparison of predicted and real hours runs, at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "hours.py"


@pytest.mark.slow
def test_predictions_stand_beside_real_seconds(tmp_path: Path, forks: None) -> None:
    """In one process and in two; only a quiet machine says how near they are."""
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(TOOL), "--toy", "--seconds", "0.5", "--results", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    unpredicted = done.stdout.count("nothing: the steps took too long")
    assert len(lines) + unpredicted == 2 and "largest difference" in done.stdout
    for each in lines:
        assert each["steps"] >= 8 and each["difference"] == pytest.approx(each["predicted"] / each["real"] - 1)
        assert 0 < each["real"] < each["whole_command"]
