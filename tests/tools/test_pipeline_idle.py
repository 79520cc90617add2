"""`tools/bench/pipeline_idle.py` counts how long the processes of a pipeline wait."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

TOOL = Path(__file__).resolve().parents[2] / "tools/bench/pipeline_idle.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_idle", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 4), (2, 8), (4, 8)])
def test_one_stage_each_waits_as_the_formula_says(bench: ModuleType, processes: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1), Narayanan et al., 2021, arXiv:2104.04473, section 2.2, as a share of all time."""
    expected = (processes - 1) / (micro_batches + processes - 1)
    assert bench.waiting(ScheduleInterleaved1F1B, processes, 1, micro_batches) == pytest.approx(expected)
    assert 0 < bench.waiting(ScheduleInterleavedZeroBubble, processes, 1, micro_batches) < expected


def test_it_prints_a_line_for_each_size(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(bench.SIZES)
    assert "| 4 | 1 | 8 | 27% | 11% |" in lines
