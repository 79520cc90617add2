"""Keeps every Nth step for ever, in RUN/permanent: for ablations, and for papers that look at training itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin
from terakoya.components.run import Run
from terakoya.toolkit.checkpoint_copies import check_every, copy_checkpoint, finish_copy

FOLDER = "permanent"


class PermanentCheckpoints(EventPlugin):
    """Keeps the checkpoint of every `every`th step in RUN/permanent, where `checkpoint.keep` does not reach it."""

    every: PositiveInt
    """Steps between two of them: a multiple of `checkpoint.save_steps`. Unit: optimizer steps."""

    test_settings: ClassVar[Mapping[str, Any]] = {"every": 1000}

    def check(self, parameters: Any) -> None:
        check_every(self.every, parameters)

    def count_copies(self, steps: int) -> int:
        return steps // self.every

    def start(self, run: Run) -> EventListener:
        return _Listener(self)


class _Listener(EventListener):
    def __init__(self, settings: PermanentCheckpoints) -> None:
        self.settings = settings

    def run_started(self, run: Run) -> None:
        """Keeps what a process saved that was killed before it could keep it."""
        if run.rank == 0:
            for folder in sorted((run.folder / "checkpoints").glob("step-*")):
                self._keep(run, folder)

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        if run.rank == 0:
            self._keep(run, folder)

    def _keep(self, run: Run, folder: Path) -> None:
        """Keeps the checkpoint `folder` if it is due. A run that went back and saved its step again replaces it."""
        step = re.fullmatch(r"step-(\d+)", folder.name)
        if step is None or int(step[1]) % self.settings.every or not (folder / "manifest.json").is_file():
            return
        target = run.folder / FOLDER / folder.name
        try:
            target.parent.mkdir(exist_ok=True)
            finish_copy(target)
            kept = target / "manifest.json"
            if not kept.is_file() or not kept.samefile(folder / "manifest.json"):
                copy_checkpoint(folder, target)
        except OSError as error:
            run.warn(f"{folder.name} could not be kept in {FOLDER}: {error.strerror}; the run continues")


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    return {"permanent_checkpoints": PermanentCheckpoints}
