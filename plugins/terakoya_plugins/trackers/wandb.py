"""Weights & Biases: one W&B run for each run, continued when the run resumes, online or offline.

After `spikes.action` `rollback` steps have other values; they go into another W&B run, NAME-attempt-2.

Credentials come from the environment or `wandb login`, never from parameters; `WANDB_MODE` and its other variables work
as usual. To upload an offline run later: `wandb sync RUN/wandb/offline-run-*`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from terakoya import hookimpl
from terakoya.components import Tracker, TrackerRun
from terakoya.errors import import_extra

FILE = "wandb.json"
"""File in the run folder with the ids of the W&B runs, by attempt."""


class WandB(Tracker):
    """Fields have the names of the arguments of `wandb.init`."""

    project: str = "terakoya"
    """The project in which the run appears."""
    entity: str | None = None
    """The user or team; null is that of the account."""
    name: str | None = None
    """The run's name; null is the name of the run folder."""
    group: str | None = None
    """The group of runs to which the run belongs; null is none."""
    tags: tuple[str, ...] = ()
    """The run's tags."""
    notes: str | None = None
    """A note of the run, shown next to its name."""
    mode: Literal["online", "offline"] | None = None
    """Whether metrics are sent (`online`) or only written to files (`offline`); null is the mode in the environment,
    otherwise online."""

    def check(self) -> None:
        import_extra("wandb", "wandb", "tracker wandb")

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens the W&B run whose id is in `run_folder`, or a new one; writes the id of a new one there.

        Raises:
            UserError: wandb is not installed.
        """
        wandb, name = import_extra("wandb", "wandb", "tracker wandb"), self.name or run_folder.resolve().name

        def init(attempt: int) -> Any:
            run = wandb.init(
                **self.model_dump(exclude={"name", "tags"}),
                name=name if attempt == 1 else f"{name}-attempt-{attempt}",
                tags=list(self.tags),
                id=run_id(run_folder, attempt),
                resume="allow",
                dir=str(run_folder),
                config=dict(parameters),
                settings=wandb.Settings(console="off", silent=True),
            )
            # A resumed run repeats steps, which would go back on W&B's own counter: our step is a separate axis.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run

        return _WandbRun(init)


class _WandbRun:
    def __init__(self, init: Callable[[int], Any]) -> None:
        self.init = init
        self.attempt = 1
        self.run = init(1)

    def begin(self, step: int, attempt: int) -> None:
        if attempt != self.attempt:
            self.run.finish()
            self.attempt = attempt
            self.run = self.init(attempt)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self) -> None:
        self.run.finish()


def run_id(folder: Path, attempt: int = 1) -> str:
    """Returns the id of the W&B run of `folder` in `attempt`; creates it at the first call."""
    file, key = folder / FILE, "id" if attempt == 1 else f"attempt-{attempt}"
    ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if key not in ids:
        ids[key] = uuid.uuid4().hex[:12]
        file.write_text(json.dumps(ids) + "\n", encoding="utf-8")
    return str(ids[key])


@hookimpl
def register_trackers() -> dict[str, type[Tracker]]:
    return {"wandb": WandB}
