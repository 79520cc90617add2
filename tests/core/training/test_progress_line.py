"""The line that shows the progress of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import toy


@pytest.mark.slow
def test_the_remaining_time_follows_the_speed_since_the_last_line_also_after_a_resume(
    store: Path, tmp_path: Path
) -> None:
    """The first line after a resume covers one step, the second about a hundred."""
    settings = toy.parameters(
        store, logging_steps=100, checkpoint={"save_steps": 99}, evaluation=None, micro_batch_size=16
    )
    toy.train({**settings, "max_steps": 99, "schedule": {"type": "constant"}}, tmp_path / "run")
    output = toy.train({**settings, "max_steps": 200, "schedule": {"type": "constant"}}, tmp_path / "run")
    (line,) = re.findall(r"step 100/200 .* remaining (\d+):(\d\d):(\d\d)", output)
    hours, minutes, seconds = map(int, line)
    per_step = 16 / toy.records(tmp_path / "run")[100]["samples_per_second"]
    assert abs(3600 * hours + 60 * minutes + seconds - 100 * per_step) <= 1
