"""Ends a run whose validation no longer improves."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin, Validations
from terakoya.components.run import Run
from terakoya.toolkit.validation_metrics import Mode, check_validates, choose_mode, is_better, read_metric


class EarlyStopping(EventPlugin):
    """Ends the run after `patience` validations in a row that were no better than the best before them.

    The run has then finished: its last checkpoint has the model, and a scheduler does not start it again.
    """

    patience: PositiveInt = 5
    """Validations in a row without an improvement. Unit: validations."""
    metric: str = "loss"
    """A number of the validation, such as `loss` or `masked_accuracy`."""
    store: str | None = None
    """The validation store that counts, by its path or its folder's name; null is the mean over all."""
    mode: Mode | None = None
    """Whether the lowest or the highest value is the best; null is "max" for accuracies, else "min"."""
    min_delta: NonNegativeFloat = 0.0
    """A value counts as better only if it is better by more than this."""
    from_step: NonNegativeInt = 0
    """Validations before this step do not count. Unit: optimizer steps."""

    def check(self, parameters: Any) -> None:
        """Raises UserError where the run does not validate."""
        check_validates(parameters)

    def start(self, run: Run) -> EventListener:
        """Returns the listener."""
        return _Listener(self)


class _Listener(EventListener):
    """`waited` counts the validations since the best one."""

    def __init__(self, settings: EarlyStopping) -> None:
        self.settings = settings
        self.mode = choose_mode(settings.metric, settings.mode)
        self.best: float | None = None
        self.best_step = -1
        self.waited = 0

    def run_started(self, run: Run) -> None:
        self._end_if_due(run)

    def validation_finished(self, run: Run, values: Validations) -> None:
        settings = self.settings
        if run.step < settings.from_step:
            return
        value = read_metric(values, settings.metric, settings.store)
        if is_better(value, self.best, self.mode, min_delta=settings.min_delta):
            self.best, self.best_step, self.waited = value, run.step, 0
        else:
            self.waited += 1
        self._end_if_due(run)

    def _end_if_due(self, run: Run) -> None:
        if self.waited >= self.settings.patience:
            best = f"its best was {self.best:.4f} at step {self.best_step:,}" if self.best is not None else "it is NaN"
            run.request_end(
                f"early_stopping: {self.settings.metric} has not improved in {self.waited} validations; {best}"
            )

    def state(self) -> Any:
        settings = self.settings
        return {
            "metric": settings.metric, "store": settings.store,
            "best": self.best, "best_step": self.best_step, "waited": self.waited,
        }  # fmt: skip

    def load(self, state: Any) -> None:
        if (state["metric"], state["store"]) == (self.settings.metric, self.settings.store):
            self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    """Registers `early_stopping`."""
    return {"early_stopping": EarlyStopping}
