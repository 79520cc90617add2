"""Weights & Biases: one of its runs for each of ours, which a resumed run goes on with. Offline too.

Who may write comes from the environment or `wandb login`, never from parameters; `WANDB_MODE` and its other variables
work as they do everywhere. Written offline, a run is sent later: `wandb sync RUN/wandb/offline-run-*`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from terakoya import hookimpl
from terakoya.components import Tracker, TrackerRun
from terakoya.errors import UserError

FILE = "wandb.json"
"""Of a run's folder: the id of its run there."""


class WandB(Tracker):
    """Fields bear the names of `wandb.init`'s arguments."""

    project: str = "terakoya"
    entity: str | None = None
    """The user or team; the account's default where not given."""
    name: str | None = None
    """The folder's name where not given."""
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    mode: Literal["online", "offline"] | None = None
    """Where not given, what the environment says, else online."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """The run that `run_folder` names, or a new one whose id is written there.

        Raises:
            UserError: the library is not there.
        """
        try:
            import wandb
        except ImportError:
            raise UserError('tracker wandb: is not installed; pip install "terakoya[wandb]"') from None
        run = wandb.init(
            **self.model_dump(exclude={"name", "tags"}),
            name=self.name or run_folder.resolve().name,
            tags=list(self.tags),
            id=run_id(run_folder),
            resume="allow",
            dir=str(run_folder),
            config=dict(parameters),
            settings=wandb.Settings(console="off", silent=True),
        )
        # A step that a resumed run does again comes after later ones: steps are an axis of ours, not its own counter.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return _Open(run)


class _Open:
    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self) -> None:
        self.run.finish()


def run_id(folder: Path) -> str:
    """The id of the run in `folder`, made once."""
    file = folder / FILE
    if file.is_file():
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    made = uuid.uuid4().hex[:12]
    file.write_text(json.dumps({"id": made}) + "\n", encoding="utf-8")
    return made


@hookimpl
def register_trackers() -> dict[str, type[Tracker]]:
    """Offers `wandb`."""
    return {"wandb": WandB}
