"""A submitted batch job and those that continue it: what the files of its plan and the scheduler say.

`batch_jobs.py` has the scripts that write and read the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from terakoya.components import JobState
from terakoya.errors import Stopped, UserError
from terakoya_launch.scheduler_programs import run_program
from terakoya_launch.submitted_batch import BatchJob, read_lines


class SubmittedBatchJob(BatchJob):
    """The job `number`, whose plan lies in `folder`; None if the folder is not known.

    Attributes:
        number: of the job, or of the last one that was submitted to continue it.
    """

    waiting: ClassVar[str]
    """A regular expression for the states of jobs that have not started."""

    def __init__(self, number: str, folder: Path | None) -> None:
        super().__init__(number)
        self.folder = folder
        self._follow()

    def find_state(self) -> JobState | None:
        """Returns the state of a job that waits or runs, in the scheduler's words; None if it has ended."""
        raise NotImplementedError

    def exit_status(self) -> int | None:
        """Returns with which code the scheduler says that the job ended; None if it knows nothing of that."""
        raise NotImplementedError

    def state(self) -> JobState:
        """Returns the state; of a job that has ended, how its script or the scheduler says that it did."""
        self._follow()
        state = self.find_state()
        if state is not None:
            return state
        file = self._file("code")
        written = file.read_text() if file is not None and file.is_file() else ""
        code = int(written) if written.strip() else self.exit_status()
        if code is None:
            return JobState("unknown", "there is no such job, or nothing is known about its end", done=True)
        if code == Stopped.exit_code:
            return JobState("ended", "stopped on request, checkpoint saved", done=True)
        return JobState("ended", f"exit code {code}" if code else "", done=True, failed=code != 0)

    def stop(self) -> str:
        """Asks its processes to save and exit, for good; deletes a job that is still waiting."""
        self._follow()
        state = self.find_state()
        if state is None:
            raise UserError(f"{self.where} stop: job {self.number} has ended")
        if re.search(self.waiting, state.status):
            run_program(self.where, "qdel", self.number)
            return f"job {self.number} was waiting and is now deleted"
        file = self._file("stop")
        if file is None:
            raise UserError(f"{self.where} stop: {self.number}: give the run's folder, where the request is left")
        file.write_text("user\n")
        return f"left a stop request for job {self.number}: it saves and exits, and no other job continues it"

    def output(self) -> Iterator[str]:
        """Yields the whole lines added to its output, and to that of the jobs that continue it, since the last call."""
        if self.folder is None:
            raise UserError(f"{self.where} logs: {self.number}: give the run's folder, beside which the output lies")
        yield from self._new_lines()
        while self._follow():
            self._read = 0
            yield from self._new_lines()

    def _new_lines(self) -> Iterator[str]:
        file = self._file("out")
        if file is None or not file.exists():
            return  # the job has not started
        lines, self._read = read_lines(file, self._read)
        yield from lines

    def _follow(self) -> bool:
        """Goes on to the job that continues this one; returns whether there is one."""
        followed = False
        while (file := self._file("next")) is not None and file.is_file():
            self.number, followed = file.read_text().strip(), True
        return followed

    def _file(self, kind: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.number}.{kind}"
