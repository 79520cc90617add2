"""`tools/bench/pipeline_idle.py` counts how long the processes of a pipeline wait."""

from __future__ import annotations

from typing import Any

import pytest
from tool_modules import load_tool
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_tool("bench/pipeline_idle")


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 4), (2, 8), (4, 8)])
def test_one_stage_each_waits_as_the_formula_says(bench: Any, processes: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1), Narayanan et al., 2021, arXiv:2104.04473, section 2.2, as a share of all time."""
    expected = (processes - 1) / (micro_batches + processes - 1)
    assert bench.waiting(ScheduleInterleaved1F1B, processes, 1, micro_batches) == pytest.approx(expected)
    assert 0 < bench.waiting(ScheduleInterleavedZeroBubble, processes, 1, micro_batches) < expected


def test_it_prints_a_line_for_each_size(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(bench.SIZES)
    assert "| 4 | 1 | 8 | 27% | 11% |" in lines
