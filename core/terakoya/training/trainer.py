"""The training loop. Start reading at `Trainer.train`; `Trainer._step` is one optimizer step on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from terakoya.components.run import StepReport
from terakoya.distributed.signals import StopRequest
from terakoya.rows.loader import Prefetcher
from terakoya.rows.row_source import RowSource
from terakoya.training.batches import BatchMaker, StepBatches
from terakoya.training.engines.engine import Engine
from terakoya.training.loss import Meter
from terakoya.training.micro_steps import MicroSteps
from terakoya.training.model.changed_settings import change_settings
from terakoya.training.plugin_events import PluginEvents
from terakoya.training.rollback import DecidedRollback, SkippedSteps, remove_checkpoints_since
from terakoya.training.run import Run
from terakoya.training.run_plan import PlannedPhase, RunPlan
from terakoya.training.saving import RETRY_SECONDS, SavedCheckpoint, Saver
from terakoya.training.step_health import StepHealth
from terakoya.training.step_log import StepLog
from terakoya.training.step_sync import StepSync, StepVote
from terakoya.training.stopping import Stopping
from terakoya.training.throughput import Throughput
from terakoya.training.validation import validate_all

START_FACTS = ("parameter_count", "trained_parameter_count", "stores", "world", "versions", "phases")
"""Those of a manifest that the record `start` has, too."""


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended.

    Attributes:
        step: optimizer steps finished.
        checkpoint: the last checkpoint.
        stopped_by: the signal or limit that stopped the run early; None where the run has finished.
    """

    step: int
    checkpoint: Path | None
    stopped_by: str | None


class Trainer:
    """Everything that one rank needs to take optimizer steps; created by `setup.build_trainer`.

    Attributes:
        facts: values for the manifests of checkpoints and for the run log.
        shapes: the shape of each tensor of the whole model that checkpoints hold, by its name.
        meter: losses since the last logged step.
        next_vote: the vote on the next step, where it was begun ahead.
        phase: the phase of the last step; of the first one before it.
        architecture: with the rotary positions that the module has now.
        throughputs: by phase.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        batches: BatchMaker,
        validation: Mapping[str, RowSource],
        *,
        facts: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        throughputs: Sequence[Throughput],
    ) -> None:
        self.run = run
        self.engine = engine
        self.batches = batches
        self.validation = validation
        self.run_log = run.run_log
        self.events = PluginEvents(run, compiled=batches.compiled)
        self.facts = facts
        self.shapes = shapes
        self.parameters, self.context = run.parameters, run.context
        self.phase = self.plan.phases[0]
        self.architecture = run.architecture
        self.throughputs = throughputs
        terms = run.objective.terms()
        self.meter = Meter(terms, run.device, run.objective.derive_metrics)
        self.health = StepHealth(run, self.meter, engine.scaler, batches)
        self.saver = Saver(run, engine)
        self.last_checkpoint: Path | None = None
        self.skipped = SkippedSteps(run, batches)
        count_names = sorted({"tokens", *(term.count for term in terms.values())})
        self.step_sync = StepSync(run, count_names, self.saver, self.events)
        self.next_vote: StepVote | None = None
        self.step_log = StepLog(run, self.meter, self.health, throughputs[0], batches)
        self.clock = clock = self.step_log.clock
        if self.context.heartbeat is not None:
            self.context.heartbeat.follow(step=lambda: run.step, work=lambda: clock.done)
        self.micro_steps = MicroSteps(run, batches, clock)
        self.profile = self.micro_steps.profile
        self.stopping = Stopping(run, self.step_log, self.saver)
        self.save_seconds = self.last_learning_rate = 0.0
        self.begin_phase(self.phase, tokens=0)

    # ------------------------------------------------------------------------------------------------- the loop

    def train(self, stop: StopRequest | None = None) -> TrainResult:
        """Takes optimizer steps until the run's length, a stop request, or an error.

        Args:
            stop: receives stop requests. After a run that was stopped it keeps listening until the caller closes it.

        Raises:
            Diverged: gradients were not finite in too many steps.
            DecidedRollback: the run goes back: a new trainer continues from the newest checkpoint.
            UserError: checkpoints could not be saved, or a plugin's event failed.
        """
        if stop is None:
            with StopRequest() as own_stop:
                return self.train(own_stop)
        run, parameters = self.run, self.parameters
        stop_reason: str | None = None
        self.step_log.log_start({name: self.facts[name] for name in START_FACTS if name in self.facts})
        self.events.call("run_started", run)
        self.events.meet()
        if run.step == 0 and not run.validation_losses:
            self._validate()
        with self.saver:
            if self.health.spikes.goes_back and run.step == 0 and self.saver.saved_step < 0:
                self._save()  # where a spike in the first steps goes back to
            stop.outlook, stop.say = self.stopping.outlook, self.run_log.print
            stop.listen()
            last_step = run.length.steps if run.length.unit == "steps" else None
            with Prefetcher(self.micro_steps.read_step, run.step, last_step=last_step) as prefetcher:

                def begin_vote(finished_steps: int) -> StepVote:
                    self.profile.begin(finished_steps + 1)
                    with self.profile.part("data"):
                        batches = self.clock.measure(partial(next, prefetcher))
                    losses = self.health.losses(finished_steps)
                    return self.step_sync.begin(batches, stop.signal or self.stopping.time_limit(), losses)

                self.step_log.begin()
                while not run.finished:
                    if self.skipped.contain(run.step):
                        next(prefetcher)
                        self.skipped.pass_over_next()
                        self.step_log.begin()
                        continue
                    vote, self.next_vote = self.next_vote or begin_vote(run.step), None
                    decision = self.step_sync.wait(vote)
                    if decision.save_finished:
                        self._report_saved(self.saver.finish())
                    self._judge(decision.losses)
                    if decision.stop:
                        stop_reason = next(filter(None, self.context.gather(vote.stop_reason)))
                        break
                    self.events.take(decision.save, decision.end)
                    if run.finished:
                        break
                    report = self._step(vote.batches, decision.counts, begin_vote)
                    self.profile.end(run.step)
                    self.events.call("step_finished", run, report)
                    if parameters.evaluation and run.step % parameters.evaluation.steps == 0:
                        self._validate()
                    if run.step % parameters.checkpoint.save_steps == 0 or self.events.save_due:
                        self._save()
                if self.next_vote is not None:  # an event has ended the run after the vote on the next step began
                    self._judge(self.step_sync.wait(self.next_vote).losses)
                self.profile.finish(run.step)  # of a run that ends among the steps to profile
            self._save_last()
        if not stop_reason:
            self._judge(self._pending_losses())
            stop.leave_after_the_end(self.stopping.say_end)
            if not run.validation_losses or run.validation_losses[-1][0] != run.step:
                self._validate()
        self.events.raise_error()
        reason = stop_reason or run.ended_by
        self.run_log.write("stopped" if stop_reason else "finished", step=run.step, reason=reason)
        self.stopping.finished = not stop_reason
        if stop_reason:
            self.run_log.print(
                f"stopped by {stop_reason} at step {run.step:,}, which is saved; the same command continues the run"
            )
        elif run.ended_by:
            self.run_log.print(f"ended at step {run.step:,}: {run.ended_by}")
        return TrainResult(run.step, self.last_checkpoint, stop_reason)

    def _step(
        self, batches: StepBatches, counts: Mapping[str, int], begin_vote: Callable[[int], StepVote] | None = None
    ) -> StepReport:
        """Takes one optimizer step: accumulates gradients over the micro-batches, clips and updates, logs. Losses are
        normalised by the global `counts`; `begin_vote` begins the vote on the step after so many."""
        run = self.run
        if self.plan.phase_at(run.step) is not self.phase or run.step == 0:
            self.begin_phase(self.plan.phase_at(run.step), tokens=run.consumed_tokens)
            if self.plan.has_phases:
                self.run_log.write("phase", step=run.step, **self.phase.record())
                if run.step:
                    self.run_log.print(self.phase.describe())

        self.clock.begin()
        for sums in self.micro_steps.take(self.engine, batches, counts, self.phase.rank_batch.micro_steps):
            self.health.step_meter.add_sums(sums)

        # Begin the vote on the next step now: ranks have just met to reduce gradients, and their votes travel while
        # weights are updated, so that no rank waits for the slowest one between two steps.
        if begin_vote is not None and self._takes_another_step(counts["tokens"]):
            self.next_vote = begin_vote(run.step + 1)

        # Clip gradients, update weights, clear gradients.
        self.last_learning_rate = learning_rate = self.next_learning_rate()
        skip_above = self.health.skip_above()
        with self.profile.part("update"):
            norm = self.engine.step(learning_rate, skip_above=skip_above)
        self.clock.step_started()

        rows = self.plan.rows(run.step)
        run.step, run.consumed_rows = run.step + 1, rows[1]
        self.health.add(norm, skip_above, counts, rows)
        run.consumed_tokens += counts["tokens"]
        return self.step_log.finish(counts["tokens"], learning_rate)

    @property
    def plan(self) -> RunPlan:
        return self.batches.plan

    def next_learning_rate(self) -> float:
        run, phase = self.run, self.plan.phase_at(self.run.step)
        return phase.learning_rate(run.progress(), run.phase_tokens if phase is self.phase else run.consumed_tokens)

    def begin_phase(self, phase: PlannedPhase, *, tokens: int) -> None:
        """Makes `phase` the one of the module, the rates and the next checkpoint; `tokens` were consumed before it."""
        run = self.run
        self.phase, run.phase, run.phase_tokens = phase, phase.number, tokens
        self.step_log.throughput = self.throughputs[phase.number - 1]
        if self.architecture != phase.parameters.architecture:
            self.architecture = phase.parameters.architecture
            change_settings(run.module, lambda: run.objective.build(self.architecture, run.vocabulary))

    def one_step(self, batches: StepBatches | None = None, *, record: bool = False) -> StepReport:
        """Takes the next step alone, for a dry run; with `record` its values are in the report in any case. Its
        micro-batches are read here where `batches` does not bring them."""
        vote = self.step_sync.begin(batches or self.micro_steps.read_step(self.run.step), None)
        self.step_log.record_next |= record
        return self._step(vote.batches, self.step_sync.wait(vote).counts)

    def _takes_another_step(self, tokens: int) -> bool:
        """Whether several processes vote on a step after this one, which takes `tokens`."""
        run = self.run
        is_last = run.length.is_reached(step=run.step + 1, tokens=run.consumed_tokens + tokens)
        return self.context.world_size > 1 and not is_last and not self.skipped.contain(run.step + 1)

    def _pending_losses(self) -> list[int]:
        """Returns the global losses of the steps that are not judged yet; collective."""
        losses = self.health.losses(self.run.step + 1)
        return self.context.sum_counts(losses) if losses else []

    def _judge(self, losses: Sequence[int]) -> None:
        """Judges the steps whose global `losses` are known; prepares to go back where they say so.

        Raises:
            Diverged: too many steps in a row were not finite, or the run would go back once too often.
            DecidedRollback: the run goes back; the checkpoints after the spike are gone.
        """
        try:
            self.health.judge(losses)
        except DecidedRollback as going:
            self.skipped.require_another_rollback(going.rollback)
            self._report_saved(self.saver.finish())  # one that is under way would appear later
            self.events.raise_error()
            self.context.decide_on_main(partial(remove_checkpoints_since, going.rollback, self.run.folder))
            going.rollbacks = (*self.skipped.rollbacks, going.rollback)
            raise

    # ----------------------------------------------------------------------------------------- validation and saving

    def _validate(self) -> None:
        """Validates on every validation store, if there are any, and logs the means."""
        if not self.validation:
            return
        run, start = self.run, time.perf_counter()
        numbers = validate_all(self.engine, run, self.validation, self.batches)
        losses = [values["loss"] for values in numbers.values()]
        run.validation_losses = (*run.validation_losses, (run.step, sum(losses) / len(losses)))
        plugin_values = self.events.call("evaluate", run)
        if plugin_values:
            self.run_log.write("validation", step=run.step, store=None, tokens=run.consumed_tokens, **plugin_values)
            self.run_log.track(run.step, {f"validation/{key}": value for key, value in plugin_values.items()})
        self.events.call("validation_finished", run, {**numbers, **({"": plugin_values} if plugin_values else {})})
        self.events.meet()
        self.step_log.leave_out(time.perf_counter() - start)

    def _save(self) -> None:
        """Saves this step, or begins to in the background. Weights that are not finite are never saved, nor is a step
        with which too many in a row were not finite."""
        run, start = self.run, time.perf_counter()
        self.events.save_due = False
        self.health.check()
        self._report_saved(self.saver.finish())  # one save at a time
        at_end = run.length.is_reached(step=run.step, tokens=run.consumed_tokens)
        phase = {"phase": {**self.phase.record(), "tokens_before": run.phase_tokens}} if self.plan.has_phases else {}
        saved = self.saver.save(
            {
                **self.facts,
                "consumed_rows": run.consumed_rows,
                "consumed_tokens": run.consumed_tokens,
                **phase,
                "learning_rates": [self.last_learning_rate, None if at_end else self.next_learning_rate()],
                "validation_losses": run.validation_losses,
                "positions": self.batches.loader.store_positions(run.consumed_rows),
                "meters": self.context.gather(self.meter.state()),
                "metered_from": self.step_log.metered_from,
                "step_health": self.health.state(self._pending_losses()),
                "events": self.events.state(),
                "loss_scaling": self.engine.scaler and self.engine.scaler.state(),
                "rollbacks": [each.to_json() for each in self.skipped.rollbacks],
            },
            event_tensors=self.events.tensors(),
            keep_before=self.health.first_open_step() - 2 if self.health.spikes.goes_back else None,
        )
        self.save_seconds = time.perf_counter() - start
        self._report_saved(saved)
        self.step_log.leave_out(time.perf_counter() - start)

    def _save_last(self) -> None:
        """Saves the step at which the run ends, unless it is saved, as often as it takes, and waits for the save."""
        while True:
            if self.saver.step != self.run.step:
                self._save()
            self._report_saved(self.saver.finish())
            if self.saver.saved_step == self.run.step:
                return
            time.sleep(RETRY_SECONDS)

    def _report_saved(self, saved: SavedCheckpoint | None) -> None:
        """Logs a checkpoint that has got its final name, if any; on every rank after the same step."""
        if saved is not None:
            self.last_checkpoint = saved.folder
            paused = round(self.save_seconds, 3)
            self.run_log.write("checkpoint", step=saved.step, folder=saved.folder.name, paused=paused)
            self.events.call("checkpoint_saved", self.run, saved.folder)
