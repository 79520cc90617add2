"""Runs on a real scheduler that a test starts: submitting them, what they printed and recorded, and waiting for it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.components import JobState, SubmittedJob
from terakoya_launch.jobs import find_job, poll_states
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import PlannedLaunch, plan_launch
from terakoya_launch.submitted import SubmittedJobRecord


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


@contextmanager
def running_cluster(script: Path, folder: Path, variables: Mapping[str, str], *, seconds: float) -> Iterator[Path]:
    """Runs the cluster that `script` starts in `folder`, with `variables` set for it and for the commands of this
    process; yields `folder`. Fails if it is not there in `seconds`."""
    ready = folder / "ready"
    environment = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", **variables}
    with (folder / "printed").open("wb") as printed:
        process = subprocess.Popen(
            ["bash", script, folder, "bash", "-c", f"touch {ready}; cat"],
            stdin=subprocess.PIPE, stdout=printed, stderr=printed,
        )  # fmt: skip
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, (folder / "printed").read_text, seconds=seconds)
        assert ready.exists(), (folder / "printed").read_text()
        yield folder
    finally:
        assert process.stdin is not None
        process.stdin.close()  # `cat` ends, and the cluster with it
        process.wait(timeout=60)
        os.environ.clear()
        os.environ.update(environment)


def submit(
    launcher: str,
    parameters: Mapping[str, Any],
    out: Path,
    settings: Mapping[str, Any],
    global_options: Sequence[str] = (),
) -> Job:
    """Submits the run of `parameters` into `out`."""
    file = out.parent / f"{out.name}.json"
    file.write_text(json.dumps(parameters))
    planned = plan_launch(launcher, file, out, LaunchOptions(global_options=global_options), settings=settings)
    assert planned.submit() == 0
    record = SubmittedJobRecord.read(planned.folder)
    assert record is not None
    job, _ = find_job(launcher, str(out))
    return Job(planned, job, record.job, out)


def find_process(variables: Mapping[str, str], *words: str) -> int:
    """Returns the process with `variables` in its environment and `words` in its command; 0 if there is none yet."""
    expected = {f"{name}={value}".encode() for name, value in variables.items()}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # the process has just exited
                continue
            if expected <= set(environment) and {word.encode() for word in words} <= set(command):
                return int(folder.name)
    return 0


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
