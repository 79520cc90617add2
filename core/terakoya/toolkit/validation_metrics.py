"""One number of a validation, and whether it is better than another: for event plugins that follow a metric."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from terakoya.components.event import Validations
from terakoya.errors import UserError

Mode = Literal["min", "max"]


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
    stores that have it; a number that an event plugin has added counts as one, too.

    Raises:
        UserError: no store has the metric.
    """
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


def check_validates(parameters: Any) -> None:
    """Raises UserError where a run with these `parameters` does not validate while it trains."""
    if parameters.evaluation is None or not parameters.data.validation:
        raise UserError(
            "metric: the run does not validate while it trains; set data.validation and evaluation.steps, for example "
            '"evaluation": {"steps": 1000}'
        )
