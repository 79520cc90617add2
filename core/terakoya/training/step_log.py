"""What a run says of its steps: a report of each for plugins, and for some a record with means and rates."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from terakoya.components.run import StepReport
from terakoya.training.batches import BatchMaker
from terakoya.training.gpu_state import gpu_values
from terakoya.training.loss import Meter, to_bits
from terakoya.training.progress_line import view_step
from terakoya.training.run import Run
from terakoya.training.step_clock import MOST_WAITS, StepClock
from terakoya.training.step_health import StepHealth
from terakoya.training.throughput import Throughput


class StepLog:
    """Reports steps, on one rank. Rates are those since the last record, without pauses for validations and saves.

    Attributes:
        metered_from: the first row of the order of whose losses `meter` has the sums.
        step_start: when the step under way began, by `time.perf_counter`.
        record_next: whether the next step gets a record, whatever its number.
        step_seconds: how long the last step took; 0.0 before the first has ended.
    """

    def __init__(self, run: Run, meter: Meter, health: StepHealth, throughput: Throughput, batches: BatchMaker) -> None:
        self.run = run
        self.run_log = run.run_log
        self.meter = meter
        self.health = health
        self.throughput = throughput
        self.batches = batches
        self.clock = StepClock(run.device)
        self.record_next = self._has_said_that_the_gpu_waits = False
        self.step_seconds = 0.0
        self.step_start = self._start = time.perf_counter()
        self.metered_from = self._first_row = self._tokens = 0

    def log_start(self, facts: Mapping[str, Any]) -> None:
        """Writes the `facts` of a start, with its length, its devices and its rows."""
        run, length = self.run, self.run.length
        hosts = list(dict.fromkeys(run.context.topology.hosts().values()))
        lengths = {"max_steps": length.steps, "max_tokens": length.tokens, "length_unit": length.unit}
        rates, rows = self.throughput.facts(), self.batches.plan.rows_per_step(run.step)
        self.run_log.write("start", step=run.step, hosts=hosts, **facts, **lengths, **rates, global_rows=rows)

    def begin(self) -> None:
        """Measures rates from now on: the first step begins, or rows were skipped."""
        self._start, self._first_row, self._tokens = time.perf_counter(), self.run.consumed_rows, 0

    def leave_out(self, seconds: float) -> None:
        """Leaves `seconds`, in which no step was taken, out of the rates."""
        self._start += seconds

    def restore(self, states: Sequence[Mapping[str, Any]], metered_from: int) -> None:
        """Continues averaging from the meters of a checkpoint, by rank, which have the losses of the rows from
        `metered_from` on.

        Each rank takes its own state; where the number of processes has changed, rank 0 takes all. Where the objective
        has other terms now, the averages begin anew.
        """
        if not all(self.meter.has_terms_of(state) for state in states):
            self.run_log.print("the loss has other terms than before: its averages begin anew")
            self.metered_from = self.run.consumed_rows
            return
        self.metered_from = metered_from
        rank, world_size = self.run.rank, self.run.world_size
        for state in [states[rank]] if len(states) == world_size else list(states) * (rank == 0):
            self.meter.add_state_sums(state["sums"])
        self.meter.seen.update(*(state["seen"] for state in states))
        self.meter.counts = dict(states[0]["counts"])

    def finish(self, tokens: int, learning_rate: float) -> StepReport:
        """Returns the report of the step that has just finished, in which all ranks took `tokens`; every
        `logging_steps` steps also writes its record. Only a step with a record waits for the device, and raises
        Diverged as `StepHealth.check` does."""
        run = self.run
        now = time.perf_counter()
        self.step_seconds, self.step_start = now - self.step_start, now
        self._tokens += tokens
        values: dict[str, float] | None = None
        if self.record_next or run.step == 1 or run.finished or run.step % run.parameters.logging_steps == 0:
            self.record_next = False
            values = self._write_record(learning_rate)
            self.begin()
        return StepReport(run.step, tokens, learning_rate, self.step_seconds, values, self.health.take_anomalies())

    def _write_record(self, learning_rate: float) -> dict[str, float]:
        """Writes the means and rates since the last record to metrics, trackers and the screen; returns them."""
        run = self.run
        of_step = self.health.log_values()
        has_loss = any(self.meter.counts.values())  # else every step since the last record was skipped
        values = self.meter.take_means(run.context.sum_on_device(self.meter.local_sums()))
        if has_loss:
            values |= to_bits(
                values, self.meter.terms, self.batches.loader.text_per_token(self.metered_from, run.consumed_rows)
            )
        self.metered_from = run.consumed_rows
        values |= {**of_step, "learning_rate": learning_rate} | ({} if has_loss else {"loss": math.nan})
        values |= self.throughput.values(
            tokens=self._tokens, samples=run.consumed_rows - self._first_row, seconds=time.perf_counter() - self._start
        )
        values |= {**self._slowest_rank(), **gpu_values(run.device), **self._gpu_waits()}
        self.run_log.write("step", step=run.step, tokens=run.consumed_tokens, **values)
        tracked = {name: value for name, value in values.items() if math.isfinite(value)}
        tracked["consumed_tokens"] = run.consumed_tokens
        self.run_log.track(run.step, {f"train/{name}": value for name, value in tracked.items()})
        self.health.check()
        plan = self.batches.plan
        view = view_step(
            run, values, remaining_rows=plan.remaining_rows(run.step, run.max_steps), title=plan.title_at(run.step - 1)
        )
        self.run_log.show_step(view, last=run.finished)
        return values

    def _gpu_waits(self) -> dict[str, float]:
        """Returns the share of steps in which the GPU waited for the host, where known; says so once if it is high."""
        share = self.clock.take_waits()
        if share is None:
            return {}
        if share >= MOST_WAITS and not self._has_said_that_the_gpu_waits:
            self._has_said_that_the_gpu_waits = True
            self.run_log.print(
                f"the GPU waits for the processor in {share:.0%} of the steps, as preparing rows and starting kernels "
                'takes longer than computing them: a larger micro_batch_size helps; "profile" shows where the time goes'
            )
        return {"gpu_waits": share}

    def _slowest_rank(self) -> dict[str, float]:
        """Returns the slowest rank since the last call, on rank 0, where there are several and it is known."""
        heartbeat = self.run.context.heartbeat
        slowest = heartbeat.slowest() if heartbeat is not None else None
        return {} if slowest is None else {"slowest_rank": slowest[0], "slowest_rank_excess": slowest[1]}
