"""Ends a run whose validation no longer improves."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin, Validations
from terakoya.components.run import Run
from terakoya.toolkit.validation_metrics import BEGINS_ANEW, BestValue, FollowsMetric


class EarlyStopping(FollowsMetric):
    """Ends the run after `patience` validations in a row that were no better than the best before them.

    The run has then finished: its last checkpoint has the model, and a scheduler does not start it again.
    """

    patience: PositiveInt = 5
    """Validations in a row without an improvement. Unit: validations."""

    def start(self, run: Run) -> EventListener:
        return _Listener(self, run)


class _Listener(EventListener):
    """`waited` counts the validations since the best one."""

    def __init__(self, settings: EarlyStopping, run: Run) -> None:
        self.settings = settings
        self.best = BestValue(settings, run)
        self.waited = 0

    def run_started(self, run: Run) -> None:
        if self.best.begins_anew:
            run.print(f"early_stopping: {BEGINS_ANEW}")
        if run.step == run.forked_at:
            self.waited = 0  # what ended the parent would end each of its forks, before their first step
        self._end_if_due(run)

    def validation_finished(self, run: Run, values: Validations) -> None:
        better = self.best.take(run, values)
        if run.step >= self.settings.from_step:
            self.waited = 0 if better else self.waited + 1
            self._end_if_due(run)

    def _end_if_due(self, run: Run) -> None:
        if self.waited >= self.settings.patience:
            value, step = self.best.value, self.best.step
            best = f"its best was {value:.4f} at step {step:,}" if value is not None else "it is NaN"
            run.request_end(
                f"early_stopping: {self.settings.metric} has not improved in {self.waited} validations; {best}"
            )

    def state(self) -> Any:
        return {**self.best.facts(), "waited": self.waited}

    def load(self, state: Any) -> None:
        self.best.load(state)
        self.waited = 0 if self.best.begins_anew else state["waited"]


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    return {"early_stopping": EarlyStopping}
