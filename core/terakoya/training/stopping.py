"""Why a run stops before its end, and what stopping would mean at this moment."""

from __future__ import annotations

import time

from terakoya.distributed.signals import Outlook
from terakoya.training.run import Run
from terakoya.training.saving import Saver
from terakoya.training.step_log import StepLog


class Stopping:
    """Answers what `StopRequest` asks about `run`, for the thread that reacts to signals. It is `finished` once the run
    log says that the run has finished."""

    def __init__(self, run: Run, step_log: StepLog, saver: Saver) -> None:
        self.finished = False
        self._run, self._step_log, self._saver = run, step_log, saver

    def time_limit(self) -> str | None:
        """Returns the reason to stop once the run has taken `max_minutes`."""
        limit = self._run.parameters.max_minutes
        reached = limit is not None and time.perf_counter() - self._run.start_time > 60 * limit
        return f"max_minutes {limit}" if reached else None

    def outlook(self) -> Outlook:
        """Returns what stopping would mean at this moment."""
        run, saver, seconds = self._run, self._saver, self._step_log.step_seconds
        left = seconds - (time.perf_counter() - self._step_log.step_start)
        if run.context.world_size > 1:
            left += seconds  # the vote on the next step may be under way
        is_step = seconds > 0 and left > -seconds  # else a validation, or the first step
        saved = saver.saved_step if saver.saved_step >= 0 else None
        return Outlook(left if is_step else None, saver.saving_step(), run.step - (saved or 0), saved)

    def say_end(self, name: str) -> None:
        """Reports a stop request, called `name`, that ends this process when all steps are saved."""
        if not self.finished:
            self._run.run_log.write("stopped", step=self._run.step, reason=name)
        self._run.run_log.print(f"{name}: all {self._run.step:,} steps are saved, and the run ends at once")
