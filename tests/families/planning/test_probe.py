"""Steps that are timed for a prediction: as much of the model as the time allows, the rest extrapolated."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.topology import LaunchInfo
from terakoya.training.setup import build_trainer
from terakoya.training.trainer import Trainer
from terakoya_planning import probe as probing
from terakoya_planning.probe import SECONDS, Probed, Sample, Timed, find_rate, probe
from terakoya_planning.step_rate import LEAST_STEPS, StepRate


class Machine:
    """A machine with a clock of its own: a step takes `row` seconds for each row and layer, and for as many rows as it
    has `head` seconds outside of the layers; in each third layer, beginning with the first, `wide` times as long."""

    def __init__(self, *, row: float, head: float = 0.0, update: float = 0.0, build: float = 0.1, wide: float = 1.0):
        self.row, self.head, self.update, self.build, self.wide = row, head, update, build, wide
        self.clock = 0.0
        self.samples: list[Sample] = []

    def rate(self, sample: Sample) -> StepRate:
        layers = sum(self.wide if layer % 3 == 0 else 1.0 for layer in range(max(1, sample.layers)))
        micro_step = sample.rows * (self.head + self.row * layers)
        return StepRate(micro_step, self.update * max(1, sample.layers), micro_step / 3)

    def time(self, sample: Sample, seconds: float) -> Timed:
        self.samples.append(sample)
        rate = self.rate(sample)
        steps = max(LEAST_STEPS, min(50, int(seconds / rate.step(1))))
        self.clock += self.build + (steps + 1) * rate.step(1) + 2 * rate.evaluation
        return Timed(rate, self.build)

    def find(self, *, layers: int, rows: int, period: int = 1, few_rows: int = 1) -> Probed | None:
        return find_rate(
            self.time, layers=layers, period=period, rows=rows, few_rows=few_rows, left=lambda: SECONDS - self.clock
        )


def test_a_small_model_is_timed_whole() -> None:
    machine = Machine(row=0.001, head=0.002, update=0.01)
    found = machine.find(layers=4, rows=32)
    assert found == Probed(machine.rate(Sample(4, 32)), "the whole model")


def test_a_large_model_is_extrapolated_from_its_layers() -> None:
    """Two kinds of layers that repeat after three need samples with whole periods between them."""
    machine = Machine(row=0.01, head=0.005, update=0.05, wide=4.0)
    found = machine.find(layers=22, rows=8, period=3)
    assert found is not None and found.said.startswith("models of 1 and ") and "rows" not in found.said
    wanted = machine.rate(Sample(22, 8))
    assert found.rate.step(1) == pytest.approx(wanted.step(1)) and found.rate.evaluation == pytest.approx(
        wanted.micro_step / 3
    )
    assert all((each.layers - 1) % 3 == 0 for each in machine.samples)


def test_a_slow_machine_takes_fewer_rows() -> None:
    machine = Machine(row=0.2, head=0.1)
    found = machine.find(layers=12, rows=16)
    assert found is not None and "of 16 rows of a micro-batch" in found.said
    assert found.rate.micro_step == pytest.approx(machine.rate(Sample(12, 16)).micro_step)


def test_a_machine_that_is_too_slow_is_not_asked_for_more() -> None:
    machine = Machine(row=3.0)
    assert machine.find(layers=12, rows=16) is None and machine.samples == [Sample(1, 1)]


def test_a_gpu_is_given_all_rows_from_the_beginning() -> None:
    machine = Machine(row=0.02)
    assert machine.find(layers=24, rows=16, few_rows=16) is not None
    assert {each.rows for each in machine.samples} == {16}


@given(
    row=st.floats(1e-6, 3), head=st.floats(0, 1), update=st.floats(0, 1), build=st.floats(0, 2),
    layers=st.integers(0, 48), rows=st.integers(1, 64),
)  # fmt: skip
def test_a_probe_is_right_or_says_nothing_and_keeps_its_time(
    row: float, head: float, update: float, build: float, layers: int, rows: int
) -> None:
    """On a machine whose time grows with layers and rows alone; the first sample is taken in any case."""
    machine = Machine(row=row, head=head, update=update, build=build)
    first = machine.find(layers=0, rows=1) and machine.clock
    machine = Machine(row=row, head=head, update=update, build=build)
    found = machine.find(layers=layers, rows=rows)
    if found is not None:
        wanted = machine.rate(Sample(layers, rows))
        assert found.rate.step(3) == pytest.approx(wanted.step(3), rel=1e-6)
    assert machine.clock <= max(SECONDS, first or 0.0) + 4 * build + 3.5 + 10 * (head + row + update)


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "lines": {"objective": {"type": "masked_lm", "layout": "lines"}},
    "pairs": {"objective": {"type": "masked_lm", "layout": "pairs", "next_sentence": True}},
    "Muon": {"optimizer": {"type": "muon", "learning_rate": 1e-3}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_real_steps_are_timed(name: str) -> None:
    """Of rows of every layout, without a store, a checkpoint or a line of a log."""
    raw = toy.parameters(Path("nowhere"), **LAYOUTS[name])
    context = connect(LaunchInfo.from_environment(node_rank=None))
    found = probe(Parameters.from_dict(raw, source="test"), context, vocab_size=500, rows=4, micro_steps=1, seconds=1e6)
    assert found is not None and found.said == "the whole model"
    assert found.rate.micro_step > 0 and found.rate.update > 0 and found.rate.evaluation > 0


def test_imports_that_a_slow_disk_takes_a_minute_for_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    late, passed = [60.0], [0.0]

    def build(*arguments: Any) -> Trainer:
        if late:
            passed.append(late.pop())
        return build_trainer(*arguments)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(passed))
    monkeypatch.setattr(probing, "time", clock)
    monkeypatch.setattr(probing, "build_trainer", build)
    parameters = Parameters.from_dict(toy.parameters(Path("nowhere")), source="test")
    context = connect(LaunchInfo.from_environment(node_rank=None))
    found = probe(parameters, context, vocab_size=500, rows=4, micro_steps=1)
    assert found is not None and found.said == "the whole model" and not late
