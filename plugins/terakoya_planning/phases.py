"""Estimates of a run with phases: one of each, and which of them needs the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from terakoya.config.parameters import Parameters
from terakoya.config.phase_plan import PhaseSpan, plan_phases
from terakoya_planning.estimate import Estimate, estimate
from terakoya_planning.row_statistics import row_statistics


@dataclass(frozen=True)
class PhaseEstimate:
    """One phase of a run.

    Attributes:
        name: what it is called, "" without a name.
        sequence_length: tokens of a row.
        span: its steps and rows.
        estimate: what it needs, as if it were a run of its own.
    """

    name: str
    sequence_length: int
    span: PhaseSpan
    estimate: Estimate

    def as_json(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name, "sequence_length": self.sequence_length, "first_step": self.span.first_step,
            **self.estimate.as_json(),
        }  # fmt: skip


def estimate_phases(parameters: Parameters, *, vocab_size: int | None, **options: Any) -> list[PhaseEstimate]:
    """Returns an estimate for each phase of `parameters`; `options` are those of `estimate`. Raises UserError as
    `estimate` does, and where no step is left for a phase."""
    of_phases, layout = parameters.of_phases, parameters.objective.row_layout()
    tokens = [row_statistics(each.data, layout, vocab_size).tokens_per_row for each in of_phases]
    rows = [sum(each.batch_size.values()) for each in of_phases]
    spans, _ = plan_phases(parameters, rows, lambda number, first_row: tokens[number])
    estimates = []
    for phase, each, span in zip(parameters.phases, of_phases, spans, strict=True):
        alone = each.model_copy(update={"max_steps": span.steps, "max_tokens": None})
        needs = estimate(alone, vocab_size=vocab_size, **options)
        estimates.append(PhaseEstimate(phase.name, each.data.sequence_length, span, needs))
    return estimates


def whole_run(phases: Sequence[PhaseEstimate], parameters: Parameters) -> Estimate:
    """Returns the estimate of the run with these `parameters`: the memory of the phase that needs most, the work and
    the time of all, and the disk for the checkpoints that are kept of all."""
    largest = max((each.estimate for each in phases), key=lambda each: each.memory.peak)
    flops = [each.estimate.flops for each in phases if each.estimate.flops is not None]
    hours = [each.estimate.hours for each in phases if each.estimate.hours is not None]
    speeds = [each.estimate.speed for each in phases if each.estimate.speed]
    steps = phases[-1].span.stop_step
    checkpoint = max((each.estimate.checkpoint for each in phases), key=lambda each: sum(each.values()))
    return replace(
        largest,
        steps=steps,
        checkpoint=checkpoint,
        disk=sum(checkpoint.values()) * (parameters.kept_checkpoints(steps) + 1),
        flops=sum(flops) if len(flops) == len(phases) else None,
        speed=max(speeds, key=lambda each: each.high / each.low, default=None),  # the least certain
        hours=(sum(low for low, _ in hours), sum(high for _, high in hours)) if len(hours) == len(phases) else None,
    )
