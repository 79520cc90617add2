"""Keeps the checkpoint of the best validation as RUN/model-best, whatever else the run removes.

The folder is a checkpoint like any other: `terakoya export RUN/model-best --out MODEL`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin, Validations
from terakoya.components.run import Run
from terakoya.toolkit.checkpoint_copies import copy_checkpoint, finish_copy
from terakoya.toolkit.validation_metrics import BEGINS_ANEW, BestValue, FollowsMetric

FOLDER = "model-best"
FACTS = "best.json"
"""The file in the folder that says which validation was the best: metric, value, step."""


class BestCheckpoint(FollowsMetric):
    """Saves a checkpoint whenever a validation is the best so far, and keeps it as RUN/model-best."""

    from_step: NonNegativeInt = 1
    """Validations before this step do not count: early ones improve each time, and each costs a checkpoint. Unit:
    optimizer steps."""

    def count_copies(self, steps: int) -> int:
        return 1

    def start(self, run: Run) -> EventListener:
        return _Listener(self, run)


class _Listener(EventListener):
    def __init__(self, settings: BestCheckpoint, run: Run) -> None:
        self.settings = settings
        self.best = BestValue(settings, run)

    def run_started(self, run: Run) -> None:
        if run.rank != 0:
            return
        if self.best.begins_anew:
            run.print(f"best_checkpoint: {BEGINS_ANEW}")
        folder = run.folder / FOLDER
        finish_copy(folder)
        facts = _facts(folder)
        if self.best.step < facts.get("step", -1) <= run.step:
            self.best.load(facts)  # after the last checkpoint of a run that had finished
        if self.best.step >= 0 and facts.get("step") != self.best.step:  # killed before the folder was made
            self._keep(run)

    def validation_finished(self, run: Run, values: Validations) -> None:
        if not self.best.take(run, values):
            return
        run.request_save()
        if run.rank == 0:
            run.print(f"step {run.step:,}: best {self.settings.metric} so far, {self.best.value:.4f}; kept as {FOLDER}")
            self._keep(run)

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        if run.rank == 0 and folder.name == f"step-{self.best.step:08d}":
            self._keep(run)

    def _keep(self, run: Run) -> None:
        step = self.best.step
        source = run.folder / "checkpoints" / f"step-{step:08d}"
        if not (source / "manifest.json").is_file():
            return
        facts = json.dumps(self.best.facts(), ensure_ascii=False) + "\n"
        try:
            copy_checkpoint(source, run.folder / FOLDER, more={FACTS: facts})
        except OSError as error:
            run.warn(f"{FOLDER} could not be made of step {step:,}: {error.strerror}; the run continues")

    def state(self) -> Any:
        return self.best.facts()

    def load(self, state: Any) -> None:
        self.best.load(state)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS).read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    return {"best_checkpoint": BestCheckpoint}
