"""The plan of a run: which rows, which length of a row and which rates each optimizer step has. All that asks for one
of them asks here.

A plan is a function of the parameters, the stores and the seed, and is made before the first step. With G for the
global batch of a phase, its step k takes the G rows from first_row + (k - first_step) G on of one endless order: a
closed formula, so no step has to know the steps before it. A run without phases has one, which is the whole run.

See docs/design/phases.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terakoya.components import Objective, Progress
from terakoya.components.progress import Length
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters, resolve_length
from terakoya.config.phase_plan import PhaseSpan, plan_phases
from terakoya.distributed.topology import RankBatch, Topology, rank_batches
from terakoya.errors import UserError
from terakoya.rows.loader import Loader, Stage
from terakoya.rows.stores import Stores
from terakoya.toolkit.schedules import WarmupSchedule, length

SAMPLED_ROWS = 256
"""Rows whose tokens are counted to estimate the mean number of tokens per row."""


@dataclass(frozen=True)
class PlannedPhase:
    """One phase of a run.

    Attributes:
        number: counted from 1.
        name: as the parameters call it; "" where they do not.
        parameters: those of the phase: its objective, its learning rate, its rows.
        span: its steps and rows.
        rank_batch: the part of its global batches that this rank takes.
        has_own_schedule, has_own_objective: whether it sets them itself: they then begin and end with the phase.
        is_last: whether the run ends with it.
    """

    number: int
    name: str
    parameters: Parameters
    span: PhaseSpan
    rank_batch: RankBatch
    has_own_schedule: bool = False
    has_own_objective: bool = False
    is_last: bool = True

    @property
    def objective(self) -> Objective:
        """What masks the rows of the phase."""
        return self.parameters.objective

    @property
    def sequence_length(self) -> int:
        """The length of its rows, in tokens."""
        return self.parameters.data.sequence_length

    def describe(self) -> str:
        """Returns for example `phase 2, context extension: steps 801 to 1,000, 16 rows of 256 tokens`."""
        span = self.span
        return (
            f"{self.title()}: steps {span.first_step + 1:,} to {span.stop_step:,}, {span.rows_per_step:,} rows of "
            f"{self.sequence_length:,} tokens"
        )

    def title(self) -> str:
        """Returns for example `phase 2, context extension`."""
        return f"phase {self.number}{self.name and f', {self.name}'}"

    def record(self) -> dict[str, object]:
        """Returns the values of the record `phase` in metrics.jsonl."""
        span = self.span
        return {
            "number": self.number, "name": self.name, "first_step": span.first_step, "steps": span.steps,
            "sequence_length": self.sequence_length, "global_rows": span.rows_per_step,
        }  # fmt: skip

    def progress(self, of_run: Progress, tokens_before: int) -> Progress:
        """Returns the progress by which the phase's schedule counts: that of the run, or with a schedule of its own
        that of the phase, in steps unless tokens end it. `tokens_before` were consumed when the phase began."""
        peak = self.parameters.optimizer.learning_rate
        if not self.has_own_schedule:
            return replace(of_run, learning_rate=peak)
        by_tokens = self.is_last and of_run.unit == "tokens"
        first = self.span.first_step
        return Progress(
            step=of_run.step - first,
            max_steps=self.span.steps,
            tokens=of_run.tokens - tokens_before,
            max_tokens=of_run.max_tokens - tokens_before if by_tokens else round(self.span.tokens),
            unit="tokens" if by_tokens else "steps",
            learning_rate=peak,
            validation=tuple((step - first, loss) for step, loss in of_run.validation if step >= first),
        )

    def check_schedule(self, start_of_run: Progress) -> None:
        """Raises UserError where the schedule does not fit the phase."""
        progress = self.progress(start_of_run, 0)
        first = replace(progress, step=0, tokens=0) if self.has_own_schedule else progress
        try:
            self.parameters.schedule.check(first)
        except UserError as error:
            raise UserError(f"phases.{self.number - 1}.{error}" if self.has_own_schedule else str(error)) from None

    def find_cut_warmup(self, start_of_run: Progress) -> tuple[str, int, int] | None:
        """Returns the unit and the length of a warm-up that is longer than the run, or than the phase where that has a
        schedule of its own, and the length of that; None where the warm-up ends."""
        schedule, progress = self.parameters.schedule, self.progress(start_of_run, 0)
        if not isinstance(schedule, WarmupSchedule) or (self.number > 1 and not self.has_own_schedule):
            return None
        unit, warmup = schedule.warmup(progress)
        return (unit, warmup, length(progress, unit)) if warmup > length(progress, unit) else None

    def final_share(self, start_of_run: Progress) -> float | None:
        """Returns the share of its peak at which the learning rate ends; None where validations decide."""
        schedule, progress = self.parameters.schedule, self.progress(start_of_run, 0)
        if schedule.needs_validation:
            return None
        return schedule.factor(replace(progress, step=progress.max_steps, tokens=progress.max_tokens))

    def learning_rate(self, of_run: Progress, tokens_before: int) -> float:
        """Returns the learning rate of the step after the progress `of_run`."""
        progress = self.progress(of_run, tokens_before)
        return progress.learning_rate * self.parameters.schedule.factor(progress)


@dataclass(frozen=True)
class RunPlan:
    """The steps of a run, on one rank.

    Attributes:
        phases: one after another; a run without phases has one.
        loader: the order of the rows.
        length: the length of the run.
        validation_batch: the part of a global batch of `batch_size` that this rank takes, by which validation counts.
        has_phases: whether the parameters have phases.
    """

    phases: Sequence[PlannedPhase]
    loader: Loader
    length: Length
    validation_batch: RankBatch
    has_phases: bool = False

    def phase_at(self, step: int) -> PlannedPhase:
        """Returns the phase of optimizer step `step`, counted from 0; the last one for steps after the run."""
        return next((phase for phase in self.phases if step < phase.span.stop_step), self.phases[-1])

    def title_at(self, step: int) -> str:
        """Returns the title of the phase of step `step`; empty in a run without phases."""
        return self.phase_at(step).title() if self.has_phases else ""

    def later_starts(self) -> list[int]:
        """Returns the steps, counted from 1, with which phases after the first begin."""
        return [phase.span.first_step + 1 for phase in self.phases[1:]]

    def largest_step(self) -> int:
        """Returns the first step with the most tokens in a micro-batch."""
        largest = max(self.phases, key=lambda each: each.rank_batch.micro_batch_size * each.sequence_length)
        return largest.span.first_step

    def rows_per_step(self, step: int) -> int:
        """Returns the rows of a whole step where step `step` is."""
        return self.phase_at(step).span.rows_per_step

    def rows(self, step: int) -> tuple[int, int]:
        """Returns the rows [start, stop) of the order that step `step` takes, on all ranks together."""
        span = self.phase_at(step).span
        start = span.first_row + (step - span.first_step) * span.rows_per_step
        stop = start + span.rows_per_step
        return start, stop if self.length.rows is None else max(start, min(stop, self.length.rows))

    def objective_progress(self, step: int) -> float:
        """Returns the share that is finished before step `step`, 0 to 1, by rows: of the run, or of a phase that has
        settings of the objective."""
        phase, row = self.phase_at(step), self.rows(step)[0]
        if phase.has_own_objective:
            span = phase.span
            return min(1.0, (row - span.first_row) / (span.stop_row - span.first_row))
        all_rows = self.length.rows or self.phases[-1].span.stop_row  # expected ones where the length is in tokens
        return min(1.0, row / all_rows)

    def remaining_rows(self, step: int, max_steps: int) -> float:
        """Returns how many rows, of the length of those before `step`, the steps from it on to `max_steps` take."""
        now = self.phase_at(step - 1)
        if not self.has_phases:
            return (max_steps - step) * now.span.rows_per_step
        work = 0
        for each in self.phases:
            steps = max(0, each.span.stop_step - max(step, each.span.first_step))
            work += steps * each.span.rows_per_step * each.sequence_length
        return work / now.sequence_length

    def check_borders(self, manifest: Mapping[str, Any]) -> None:
        """Raises UserError where phases began at other steps than those of the plan, before the checkpoint with this
        `manifest`."""
        step = manifest["step"]
        saved = manifest.get("phases", [{"first_step": 0}])
        before = [each["first_step"] for each in saved if each["first_step"] < step]
        now = [phase.span.first_step for phase in self.phases if phase.span.first_step < step]
        if before != now:
            steps = [", ".join(f"{first + 1:,}" for first in each) for each in (before, now)]
            raise UserError(
                f"phases: up to step {step:,}, that of the checkpoint, phases began at steps {steps[0]}, but now they "
                f"would have begun at {steps[1]}: give them such lengths that they begin where they did; a share is "
                "one of the length of the run"
            )

    def continued_at(self, step: int, row: int) -> RunPlan:
        """Returns the plan of the run from step `step` on, which takes the rows from `row` on: not where the plan has
        it in a run of epochs whose last step held fewer rows before it was made longer. Raises UserError if the phases
        before this step take another number of rows."""
        if self.rows(step)[0] == row:
            return self
        if self.has_phases:
            raise UserError(
                f"phases: the {step:,} steps of the checkpoint took {row:,} rows, but with these phases they take "
                f"{self.rows(step)[0]:,}: keep the phases before this step as they were, and change later ones"
            )
        only = self.phases[0]
        span = replace(only.span, first_step=step, first_row=row, steps=max(0, only.span.stop_step - step))
        return replace(self, phases=[replace(only, span=span)])


def make_plan(parameters: Parameters, stores: Stores, topology: Topology, rank: int) -> RunPlan:
    """Returns the plan of the run for `rank`. Raises UserError if batch tables do not fit the processes, a store does
    not fit the rows, or a phase has no step."""
    of_phases, objective = parameters.of_phases, parameters.objective
    redistribute = parameters.on_lost_node == "redistribute"

    def rank_batch(each: Parameters) -> RankBatch:
        return rank_batches(each.batch_size, each.micro_batch_size, topology, redistribute=redistribute)[rank]

    batches = [rank_batch(each) for each in of_phases]
    rows_per_step = [batch.global_rows for batch in batches]
    layout = objective.row_layout()
    for number, each in enumerate(of_phases):
        each.objective.check(stores.vocabulary, sequence_length=each.data.sequence_length)
        if each.objective.terms() != objective.terms() or each.objective.row_layout() != layout:
            raise UserError(
                f"phases.{number}.objective: would change the terms of the loss or the layout of rows, which are those "
                "of the whole run; a phase can change what masking alone depends on"
            )
    if not parameters.phases:
        loader = stores.loader(layout, seed=parameters.seed, global_rows=rows_per_step[0])
        rows = sum(len(source) for source in loader.sources)
        length = resolve_length(
            parameters,
            rows=rows,
            tokens_per_row=_tokens_per_row(loader, 0, objective, stores.vocabulary) if rows else 0.0,
            global_rows=rows_per_step[0],
        )
        return plan_without_phases(parameters, loader, batches[0], length)
    loader, stages = stores.loader_of_parts(layout, seed=parameters.seed, parts=parameters.all_data)

    def tokens_per_row(number: int, first_row: int) -> float:
        nonlocal loader
        if number:
            loader = loader.with_stage(Stage(first_row, stages[number]))
        return _tokens_per_row(loader, first_row, objective, stores.vocabulary)

    spans, length = plan_phases(parameters, rows_per_step, tokens_per_row)
    planned = [
        PlannedPhase(
            number + 1, phase.name, each, span, batch,
            has_own_schedule=phase.schedule is not None, has_own_objective=bool(phase.objective),
            is_last=number == len(spans) - 1,
        )
        for number, (phase, each, span, batch) in enumerate(
            zip(parameters.phases, of_phases, spans, batches, strict=True)
        )
    ]  # fmt: skip
    return RunPlan(planned, loader, length, rank_batch(parameters), has_phases=True)


def plan_without_phases(parameters: Parameters, loader: Loader, rank_batch: RankBatch, length: Length) -> RunPlan:
    """Returns the plan of a run that has the same rates, rows and batches throughout."""
    span = PhaseSpan(0, length.steps, 0, rank_batch.global_rows, length.tokens / max(1, length.steps))
    return RunPlan([PlannedPhase(1, "", parameters, span, rank_batch)], loader, length, rank_batch)


def _tokens_per_row(loader: Loader, first_row: int, objective: Objective, vocabulary: Vocabulary) -> float:
    """Returns the mean number of real tokens per row, as the objective counts them, in the rows from `first_row` on."""
    rows = loader.load(first_row, first_row + SAMPLED_ROWS)
    return objective.collate(rows, vocabulary).counts["tokens"] / SAMPLED_ROWS
