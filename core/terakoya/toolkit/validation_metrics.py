"""One number of a validation, and whether it is better than another: for event plugins that follow a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from terakoya.components import EventPlugin
from terakoya.components.event import Validations
from terakoya.components.run import Run
from terakoya.errors import UserError
from terakoya.toolkit.changing_rates import ChangingRate

Mode = Literal["min", "max"]

BEGINS_ANEW = (
    "its metric, the rows of validation or the objective are others than before, so it looks for the best anew"
)
SAVES_MEMORY = frozenset({"head_positions"})
"""Settings of objectives that change no loss."""


def choose_mode(metric: str, mode: Mode | None) -> Mode:
    """Returns `mode`; where it is None, "max" for accuracies and "min" for every other metric."""
    return mode or ("max" if "accuracy" in metric else "min")


def is_better(value: float, best: float | None, mode: Mode, *, min_delta: float = 0.0) -> bool:
    """Returns whether `value` is better than `best` by more than `min_delta`. NaN is never better; anything else is
    better than None."""
    if math.isnan(value):
        return False
    return best is None or (best - value if mode == "min" else value - best) > min_delta


def read_metric(values: Validations, metric: str, store: str | None) -> float:
    """Returns `metric` of one validation: that on `store` (its path, or its folder's name), else the mean over all
    stores that have it; a number that an event plugin has added counts as one, too. Raises UserError if no store has
    the metric."""
    found = {
        name: numbers[metric]
        for name, numbers in values.items()
        if metric in numbers and (store is None or store in (name, Path(name).name))
    }
    if not found:
        known = sorted({name for numbers in values.values() for name in numbers})
        where = f" on {store}" if store is not None else ""
        stores = f"; stores: {', '.join(name for name in values if name)}" if store is not None else ""
        raise UserError(f"metric: the validation has no {metric}{where}; it has {', '.join(known)}{stores}")
    return sum(found.values()) / len(found)


def measuring_settings(parameters: Any) -> dict[str, Any]:
    """Returns what the numbers of a validation depend on, beside the weights and the documents, as JSON values by key.
    Validation takes the last value of a rate that changes."""
    objective = parameters.objective
    last = {name: value.end for name, value in dict(objective).items() if isinstance(value, ChangingRate)}
    settings = {"type": type(objective).__name__, **objective.model_copy(update=last).model_dump(mode="json")}
    return {
        "seed": parameters.seed,
        "data.sequence_length": parameters.data.sequence_length,
        **{f"objective.{name}": value for name, value in settings.items() if name not in SAVES_MEMORY},
    }


class FollowsMetric(EventPlugin):
    """The settings of an event plugin that follows a metric."""

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
        """Raises UserError where the run does not validate while it trains."""
        if parameters.evaluation is None or not parameters.data.has_validation:
            raise UserError(
                "metric: the run does not validate while it trains; set data.validation or data.split, and "
                'evaluation.steps, for example "evaluation": {"steps": 1000}'
            )


class BestValue:
    """The best value of a metric so far, among validations on the same rows with the same objective.

    Attributes:
        value, step: that value and the step of its validation; None and -1 before the first.
        begins_anew: whether `load` was given facts that cannot be compared.
    """

    def __init__(self, settings: FollowsMetric, run: Run) -> None:
        self.settings = settings
        self.value: float | None = None
        self.step = -1
        self.begins_anew = False
        self._mode = choose_mode(settings.metric, settings.mode)
        self._rows = run.validation_rows
        self._measured_with = measuring_settings(run.parameters)

    def take(self, run: Run, values: Validations) -> bool:
        """Takes the validation of this step; returns whether it counts and is the best one. Raises UserError if it has
        no such metric."""
        settings = self.settings
        value = read_metric(values, settings.metric, settings.store)
        better = is_better(value, self.value, self._mode, min_delta=settings.min_delta)
        if run.step < settings.from_step or not better:
            return False
        self.value, self.step = value, run.step
        return True

    def facts(self) -> dict[str, Any]:
        """Returns the value, and of what it is, as JSON values."""
        return {
            "metric": self.settings.metric, "store": self.settings.store, "validation_rows": self._rows,
            "measured_with": self._measured_with, "value": self.value, "step": self.step,
        }  # fmt: skip

    def load(self, facts: Mapping[str, Any]) -> None:
        """Continues from `facts`, or `begins_anew` where they are of another metric, other rows or another objective.
        What older facts do not say counts as equal."""
        now = self.facts()
        same = all(facts.get(key, now[key]) == now[key] for key in ("metric", "store", "validation_rows"))
        before = facts.get("measured_with", {})
        same = same and all(before.get(key, value) == value for key, value in self._measured_with.items())
        self.begins_anew = not same or "value" not in facts
        if not self.begins_anew:
            self.value, self.step = facts["value"], facts["step"]
