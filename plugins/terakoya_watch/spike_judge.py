"""What happens when a spike is found: it is recorded, the update of its step is left out, or the run goes back.

See docs/design/spikes.md.
"""

from __future__ import annotations

import math
from typing import Any

from terakoya.training.batches import BatchMaker
from terakoya.training.rollback import DecidedRollback, Rollback
from terakoya.training.run import Run
from terakoya.training.step_health import PendingStep, StepHealth, StepJudge
from terakoya_watch.spikes import Spike, SpikeDetector


class SpikeJudge(StepJudge):
    """Judges the steps of `run` by its `spikes`. A phase and a stage of the data begin with an empty window."""

    def __init__(self, run: Run, batches: BatchMaker) -> None:
        parameters = run.parameters
        assert parameters.spikes is not None
        starts = [*(stage.from_step for stage in parameters.data.stages), *batches.plan.later_starts()]
        self.settings, self.detector = parameters.spikes, SpikeDetector(parameters.spikes, starts)
        self.goes_back = parameters.spikes.action == "rollback"

    def skip_above(self, step: int) -> float:
        return self.detector.norm_limit(step) if self.settings.action == "skip" else math.inf

    def judge(self, health: StepHealth, step: PendingStep, loss: float) -> None:
        if math.isfinite(step.grad_norm):
            spikes = self.detector.add(step.step, loss=loss, grad_norm=step.grad_norm)
            if step.left_out and not any(spike.signal == "grad_norm" for spike in spikes):
                level = self.detector.grad_norm.level()
                spikes.append(Spike("grad_norm", step.grad_norm, level, step.skip_above))
            for spike in spikes:
                note(health, step, spike)
        elif health.scaler is None:  # overflows are usual in fp16, and say nothing about the loss
            self.detector.add_not_finite()
        else:
            return
        lasting = self.detector.lasting
        if self.goes_back and lasting is not None and lasting.steps >= self.settings.lasting_steps:
            seen = (
                f"the loss was {lasting.value:.4g} in step {lasting.step:,}, where {lasting.level:.4g} is usual, and "
                f"has stayed above {lasting.limit:.4g} up to step {step.step:,}"
            )
            facts = {"spike": lasting.step, "value": lasting.value, "level": lasting.level, "limit": lasting.limit}
            raise DecidedRollback(Rollback(max(1, lasting.step - 1), step.step, facts, seen))

    def first_open_step(self) -> int | None:
        return None if self.detector.lasting is None else self.detector.lasting.step

    def state(self) -> Any:
        return self.detector.state()

    def load(self, state: Any) -> None:
        self.detector.load(state)


def note(health: StepHealth, step: PendingStep, spike: Spike) -> None:
    """Records `spike`; prints it where it concerns the loss, or where it has kept the weights from an update: a norm
    that is high once is usual while a model learns fast."""
    rows, documents = health.describe(step)
    found = f"{spike.value:.4g} is a spike: {spike.level:.4g} is usual, {spike.limit:.4g} was the limit"
    found = f"the loss {found}" if spike.signal == "loss" else f"the gradient norm {found}"
    found += "; its update was left out" * step.left_out
    if spike.signal == "loss" or step.left_out:
        report = f"terakoya report {health.run.folder} names its documents"
        health.run_log.print(f"warning: step {step.step:,}: {found}; {report}")
    health.note(
        step, "spike", f"{found}; the step took {rows}",
        signal=spike.signal, value=spike.value, level=spike.level, limit=spike.limit, skipped=step.left_out,
        **documents,
    )  # fmt: skip
