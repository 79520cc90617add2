"""Runs that a test submitted to a real scheduler: what they printed and recorded, and waiting for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.components import JobState, SubmittedJob
from terakoya.launch.jobs import poll_states
from terakoya.launch.plan import PlannedLaunch


@dataclass
class Job:
    """A submitted run."""

    planned: PlannedLaunch
    job: SubmittedJob
    number: str
    run: Path

    def printed(self) -> str:
        """Returns the job's output so far."""
        file = self.planned.folder / f"{self.number}.out"
        return file.read_text() if file.exists() else ""

    def wait_for_step(self, step: int) -> None:
        """Returns when the run has logged `step`, or a later one."""
        wait_for(lambda: steps(self.run) >= step, self.printed)

    def wait(self) -> JobState:
        """Waits for the end; returns the final state."""
        return list(poll_states(self.job, every=0.5))[-1]

    def resumed_at(self) -> list[int]:
        """Returns the steps from which the run resumed."""
        return [record["step"] for record in records(self.run, "resume")]


def wait_for(condition: Callable[[], bool], printed: Callable[[], str], *, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, printed()
        time.sleep(0.2)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def steps(run: Path) -> int:
    return max((record["step"] for record in records(run, "step")), default=0)


def weights(run: Path, step: int) -> bytes:
    """Returns the bytes of the model in the checkpoint of `step`."""
    return (run / f"checkpoints/step-{step:08}/model/model.safetensors").read_bytes()
