"""The loop: read, not configured. One screen from a step's rows to its report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from terakoya.components import LossTerm
from terakoya.components.run import StepReport
from terakoya.config.parameters import Parameters
from terakoya.plugins import PluginError, Registry
from terakoya.rows.loader import Prefetcher
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.random_keys import hash_u64
from terakoya.training.batches import BatchMaker, StepBatches, to_device
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.distributed.signals import StopRequest
from terakoya.training.distributed.topology import RankBatch
from terakoya.training.engines.engine import Engine
from terakoya.training.gradient_norms import Norms
from terakoya.training.loss import Meter, weighted_loss
from terakoya.training.progress_line import progress_line
from terakoya.training.run import Run
from terakoya.training.run_log import RunLog
from terakoya.training.saving import Saved, Saver
from terakoya.training.step_sync import StepSync, StepVote
from terakoya.training.throughput import Throughput, described
from terakoya.training.validation import validate

DROPOUT = "dropout"


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended: steps finished, the last checkpoint, the signal that ended it early if one did."""

    step: int
    checkpoint: Path | None
    stopped_by: str | None


class Trainer:
    """Everything one rank needs to take optimizer steps; set up by `setup.build`."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        batches: BatchMaker,
        validation: Mapping[str, RowSource],
        run_log: RunLog,
        registry: Registry,
        *,
        tokenizer_folder: Path,
        facts: Mapping[str, Any],
        throughput: Throughput,
        flash: bool,
    ) -> None:
        self.run = run
        self.engine = engine
        self.batches = batches
        self.validation = validation
        self.run_log = run_log
        self.registry = registry
        self.facts = facts
        self.throughput = throughput
        self.flash = flash
        self.parameters: Parameters = run.parameters
        self.context: DistributedContext = run.context
        self.rank_batch: RankBatch = batches.rank_batch
        self.terms: Mapping[str, LossTerm] = run.objective.terms()
        self.meter = Meter(self.terms, run.device, run.objective.derive_metrics)
        self.norms = Norms(engine.scaler)
        self.last_checkpoint: Path | None = None
        self.saver = Saver(run, engine, tokenizer_folder)
        names = sorted({"tokens", *(term.count for term in self.terms.values())})
        self.step_sync = StepSync(self.context, names, self.saver)
        self.paused = 0.0
        self.next_vote: StepVote | None = None
        self.started = self.mark = time.perf_counter()
        self.tokens_since_mark = self.rows_at_mark = 0

    # ------------------------------------------------------------------------------------------------- the loop

    def train(self, stop: StopRequest | None = None) -> TrainResult:
        """Steps until the run's length, a wish to stop, or an error. Returns how it ended.

        `stop` hears wishes; where they were followed it goes on listening, until the caller closes it.
        """
        if stop is None:
            with StopRequest() as mine:
                return self.train(mine)
        run, parameters = self.run, self.parameters
        asked: str | None = None
        self._write_start()
        for note in self.saver.notes():
            self.run_log.print(note)
        self._event("run_started", run)
        if run.step == 0 and self.validation:
            self._validate()
        with self.saver:
            stop.listen()
            with Prefetcher(self.batches, run.step) as prefetcher:

                def begin_vote() -> StepVote:
                    return self.step_sync.begin(next(prefetcher), stop.signal or self._out_of_time())

                self.mark, self.rows_at_mark = time.perf_counter(), run.consumed_rows
                while not run.finished:
                    if parameters.data.skips(run.step):
                        next(prefetcher)
                        self._skip()
                        continue
                    vote, self.next_vote = self.next_vote or begin_vote(), None
                    decision = self.step_sync.wait(vote)
                    if decision.save_finished:
                        self._saved(self.saver.finish())
                    if decision.stop:
                        asked = vote.stop_reason or "another process"
                        break
                    report = self._step(vote.batches, decision.counts, begin_vote)
                    self._event("step_finished", run, report)
                    if parameters.evaluation and self.validation and self._due(parameters.evaluation.steps):
                        self._validate()
                    if self._due(parameters.checkpoint.save_steps):
                        self._save()
            if self.saver.step != run.step:
                self._save()
            self._saved(self.saver.finish())
        if not asked:
            stop.close()
        if not asked and self.validation and not (parameters.evaluation and self._due(parameters.evaluation.steps)):
            self._validate()
        self.step_sync.raise_plugin_error()
        self.run_log.write("finished" if not asked else "stopped", step=run.step, reason=asked)
        if asked:
            self.run_log.print(f"stopped by {asked} at step {run.step:,}, which is saved; the same command goes on")
        return TrainResult(run.step, self.last_checkpoint, asked)

    def one_step(self) -> StepReport:
        """The next step alone, as a trial."""
        vote = self.step_sync.begin(self.batches(self.run.step), None)
        return self._step(vote.batches, self.step_sync.wait(vote).counts)

    def _step(
        self, batches: StepBatches, counts: Mapping[str, int], begin_vote: Callable[[], StepVote] | None = None
    ) -> StepReport:
        """One optimizer step on this rank's `batches`, normalised by the global `counts`.

        Where there are several processes the next step is proposed as soon as this one's gradients are there: ranks
        have just met to add them up, and what they tell each other travels while weights are updated.
        """
        run, parameters = self.run, self.parameters
        empty = self.rank_batch.micro_steps - len(batches.real)  # they come first: the last may bring the sums of all
        for micro in range(-empty, len(batches.real)):
            seed(run.device, self._dropout_seed(micro))
            batch = batches.real[micro] if micro >= 0 else batches.dummy
            assert batch is not None
            loss_fn = partial(weighted_loss, terms=self.terms, counts=counts, factor=float(micro >= 0))
            tensors = to_device(batch, run.device, flash=self.flash)
            sums = self.engine.micro_step(tensors, loss_fn, last=micro == len(batches.real) - 1)
            if micro >= 0:
                self.meter.add_sums(sums)
        if begin_vote is not None and self._another_step(counts["tokens"]):
            self.next_vote = begin_vote()
        self.meter.add_counts(counts)
        learning_rate = parameters.optimizer.learning_rate * parameters.schedule.factor(run.progress())
        self.norms.add(self.engine.step(learning_rate))
        _, run.consumed_rows = self.batches.rows(run.step)
        run.step += 1
        run.consumed_tokens += counts["tokens"]
        return self._report(counts["tokens"], learning_rate)

    def _another_step(self, tokens: int) -> bool:
        """Whether other processes are to hear of a step after this one, which takes `tokens`."""
        run = self.run
        last = run.length.reached(step=run.step + 1, tokens=run.consumed_tokens + tokens)
        return self.context.world_size > 1 and not last and not self.parameters.data.skips(run.step + 1)

    def _skip(self) -> None:
        """Passes over the rows of the next step; it counts, but changes nothing."""
        run = self.run
        _, run.consumed_rows = self.batches.rows(run.step)
        run.step += 1
        if not self.parameters.data.skips(run.step):
            self.run_log.write("skip", step=run.step)
            self.run_log.print(f"passed over the rows of the steps up to {run.step:,}, as data.skip_steps says")
        self.mark, self.rows_at_mark = time.perf_counter(), run.consumed_rows

    def _dropout_seed(self, micro: int) -> int:
        """A seed of its own for each step, micro-step and process, or replica: no generator's state needs saving."""
        seed = hash_u64(self.parameters.seed, DROPOUT, self.run.step, micro, self.engine.dropout_rank)
        return int(seed) & 0x7FFF_FFFF_FFFF_FFFF

    # --------------------------------------------------------------------------------------------- what is told

    def _report(self, tokens: int, learning_rate: float) -> StepReport:
        run = self.run
        now = time.perf_counter()
        self.tokens_since_mark += tokens
        seconds = now - self.started
        self.started = now
        values: dict[str, float] | None = None
        if run.step == 1 or run.finished or self._due(self.parameters.logging_steps):
            values = self.meter.take(self.context.sum_on_device(self.meter.stacked()))
            values |= {**self.norms.values(), "learning_rate": learning_rate}
            samples, elapsed = run.consumed_rows - self.rows_at_mark, time.perf_counter() - self.mark
            values |= self.throughput.values(tokens=self.tokens_since_mark, samples=samples, seconds=elapsed)
            self.run_log.write("step", step=run.step, tokens=run.consumed_tokens, **values)
            tracked = {name: value for name, value in values.items() if math.isfinite(value)}
            tracked["consumed_tokens"] = run.consumed_tokens
            self.run_log.track(run.step, {f"train/{name}": value for name, value in tracked.items()})
            self._look_at_norms()
            line = progress_line(run, values, rows=self.rank_batch.global_rows)
            self.run_log.show_progress(line, last=run.finished)
            self.mark, self.tokens_since_mark, self.rows_at_mark = time.perf_counter(), 0, run.consumed_rows
        return StepReport(run.step, tokens, learning_rate, seconds, values)

    def _write_start(self) -> None:
        """Writes down what the run is, for those who read its files."""
        length, rows = self.run.length, self.rank_batch.global_rows
        names = ("parameter_count", "trained_parameter_count", "stores", "world", "versions")
        facts = {name: self.facts[name] for name in names}
        facts |= {"max_steps": length.steps, "max_tokens": length.tokens, "length_unit": length.unit}
        self.run_log.write("start", step=self.run.step, **facts, global_rows=rows, **described(self.throughput))

    def _look_at_norms(self) -> None:
        run = self.run
        self.norms.look(run, self.run_log, first_row=self.batches.rows(run.step - 1)[0])

    # ------------------------------------------------------------------------------------ now and then

    def _validate(self) -> None:
        """Validates on every validation store and writes the means down."""
        parameters, run = self.parameters, self.run
        paused = time.perf_counter()
        batches = parameters.evaluation.batches if parameters.evaluation else 50
        losses = []
        for name, source in self.validation.items():
            values = validate(
                self.engine, self.context, source, run.objective, run.vocabulary, self.rank_batch,
                batches=batches, flash=self.flash,
            )  # fmt: skip
            losses.append(values["loss"])
            self.run_log.write("validation", step=run.step, store=name, tokens=run.consumed_tokens, **values)
            self.run_log.track(
                run.step, {f"validation/{Path(name).name}/{key}": value for key, value in values.items()}
            )
            shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
            self.run_log.print(f"step {run.step:,}  validation on {name}: {shown}")
        # rank 0's, so that no rounding of a sum over ranks can part the learning rates of two of them
        mean = self.context.broadcast(sum(losses) / len(losses))
        run.validation_losses = (*run.validation_losses, (run.step, mean))
        added = self._event("evaluate", run)
        if added:
            self.run_log.write("validation", step=run.step, store=None, tokens=run.consumed_tokens, **added)
            self.run_log.track(run.step, {f"validation/{key}": value for key, value in added.items()})
        self.mark += time.perf_counter() - paused

    def _save(self) -> None:
        """Saves this step, or begins to; a step that is no number is never saved."""
        start = time.perf_counter()
        self._look_at_norms()
        self._saved(self.saver.finish())  # one at a time
        saved = self.saver.save(
            {
                **self.facts,
                "consumed_rows": self.run.consumed_rows,
                "consumed_tokens": self.run.consumed_tokens,
                "validation_losses": self.run.validation_losses,
                "positions": self.batches.loader.store_positions(self.run.consumed_rows),
                "meters": self.context.gather(self.meter.state()),
                "loss_scaling": self.engine.scaler and self.engine.scaler.state(),
            }
        )
        self.paused = time.perf_counter() - start
        self._saved(saved)
        self.mark += time.perf_counter() - start

    def _saved(self, saved: Saved | None) -> None:
        """Tells of a checkpoint that now has its name; on every rank after the same step."""
        if saved is not None:
            self.last_checkpoint = saved.folder
            self.run_log.write("checkpoint", step=saved.step, folder=saved.folder.name, paused=round(self.paused, 3))
            self._event("checkpoint_saved", self.run, saved.folder)

    def restore_meters(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on averaging where the checkpoint stood: each rank its own, or rank 0 all in another world."""
        mine = [states[self.run.rank]] if len(states) == self.run.world_size else list(states) * (self.run.rank == 0)
        for state in mine:
            self.meter.add_state(state["sums"])
        self.meter.seen.update(*(state["seen"] for state in states))
        self.meter.counts = dict(states[0]["counts"])

    def _due(self, every: int) -> bool:
        return self.run.step % every == 0

    def _out_of_time(self) -> str | None:
        limit = self.parameters.max_minutes
        over = limit is not None and time.perf_counter() - self.run.facts["start"] > 60 * limit
        return f"max_minutes {limit}" if over else None

    def _event(self, name: str, *arguments: Any) -> Any:
        """Calls an event; what a plugin raises is kept and told to all ranks before the next step."""
        try:
            return getattr(self.registry.hook, name)(*arguments)
        except PluginError as error:
            self.step_sync.plugin_error = error
            return None


def seed(device: torch.device, value: int) -> None:
    """Seeds the generator that dropout on `device` draws from; torch.manual_seed would also keep a formatted stack of
    its caller for each kind of device that is not there, at half a millisecond a step."""
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    generator.manual_seed(value)
