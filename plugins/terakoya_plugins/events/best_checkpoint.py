"""Keeps the checkpoint of the best validation as RUN/model-best, whatever else the run removes.

The folder is a checkpoint like any other: `terakoya export RUN/model-best --out MODEL`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin, Validations
from terakoya.components.run import Run
from terakoya.toolkit.checkpoint_copies import copy_checkpoint, finish_copy
from terakoya.toolkit.validation_metrics import Mode, check_validates, choose_mode, is_better, read_metric

FOLDER = "model-best"
FACTS = "best.json"
"""The file in the folder that says which validation was the best: metric, value, step."""


class BestCheckpoint(EventPlugin):
    """Saves a checkpoint whenever a validation is the best so far, and keeps it as RUN/model-best."""

    metric: str = "loss"
    """A number of the validation, such as `loss` or `masked_accuracy`."""
    store: str | None = None
    """The validation store that counts, by its path or its folder's name; null is the mean over all."""
    mode: Mode | None = None
    """Whether the lowest or the highest value is the best; null is "max" for accuracies, else "min"."""
    min_delta: NonNegativeFloat = 0.0
    """A value counts as better only if it is better by more than this."""
    from_step: NonNegativeInt = 1
    """Validations before this step do not count: early ones improve each time, and each costs a checkpoint. Unit:
    optimizer steps."""

    def check(self, parameters: Any) -> None:
        """Raises UserError where the run does not validate."""
        check_validates(parameters)

    def start(self, run: Run) -> EventListener:
        """Returns the listener."""
        return _Listener(self)


class _Listener(EventListener):
    def __init__(self, settings: BestCheckpoint) -> None:
        self.settings = settings
        self.mode = choose_mode(settings.metric, settings.mode)
        self.best: float | None = None
        self.step = -1

    def run_started(self, run: Run) -> None:
        if run.rank != 0:
            return
        folder = run.folder / FOLDER
        finish_copy(folder)
        facts = _facts(folder)
        same = facts.get("metric") == self.settings.metric and facts.get("store") == self.settings.store
        value, step = facts.get("value"), facts.get("step", -1)
        if same and isinstance(value, int | float) and self.step < step <= run.step:
            self.best, self.step = float(value), step  # after the last checkpoint of a run that had finished
        if self.step >= 0 and facts.get("step") != self.step:  # killed before the folder was made
            self._keep(run)

    def validation_finished(self, run: Run, values: Validations) -> None:
        value = read_metric(values, self.settings.metric, self.settings.store)
        better = is_better(value, self.best, self.mode, min_delta=self.settings.min_delta)
        if run.step < self.settings.from_step or not better:
            return
        self.best, self.step = value, run.step
        run.request_save()
        if run.rank == 0:
            run.print(f"step {run.step:,}: best {self.settings.metric} so far, {value:.4f}; kept as {FOLDER}")
            self._keep(run)

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        if run.rank == 0 and folder.name == f"step-{self.step:08d}":
            self._keep(run)

    def _keep(self, run: Run) -> None:
        """Makes the folder from the checkpoint of the best step, if that is there already."""
        source = run.folder / "checkpoints" / f"step-{self.step:08d}"
        if not (source / "manifest.json").is_file():
            return
        settings = self.settings
        facts = {"metric": settings.metric, "store": settings.store, "value": self.best, "step": self.step}
        try:
            copy_checkpoint(source, run.folder / FOLDER, more={FACTS: json.dumps(facts, ensure_ascii=False) + "\n"})
        except OSError as error:
            run.warn(f"{FOLDER} could not be made of step {self.step:,}: {error.strerror}; the run continues")

    def state(self) -> Any:
        return {"metric": self.settings.metric, "store": self.settings.store, "best": self.best, "step": self.step}

    def load(self, state: Any) -> None:
        if (state["metric"], state["store"]) == (self.settings.metric, self.settings.store):
            self.best, self.step = state["best"], state["step"]


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS).read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    """Registers `best_checkpoint`."""
    return {"best_checkpoint": BestCheckpoint}
