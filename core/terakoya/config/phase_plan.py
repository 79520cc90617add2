"""What the phases of a run mean: their checks, the keys that each changes, and the steps that each has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from terakoya.components import Component
from terakoya.components.progress import Length
from terakoya.config.data import Data
from terakoya.config.phases import LENGTHS, Phase
from terakoya.errors import UserError, nearest
from terakoya.json_settings import explain

if TYPE_CHECKING:
    from terakoya.config.fields import ParameterFields

C = TypeVar("C", bound=Component)


@dataclass(frozen=True)
class PhaseSpan:
    """The steps of one phase: a function of the parameters, the stores and the seed.

    Attributes:
        first_step: the number of its first optimizer step, counted from 0.
        steps: how many it has; an expectation in the last phase of a run whose length is in tokens.
        first_row: its first row in the order of the run.
        rows_per_step, tokens_per_row: rows of a global batch, expected real tokens of a row.
    """

    first_step: int
    steps: int
    first_row: int
    rows_per_step: int
    tokens_per_row: float

    @property
    def stop_step(self) -> int:
        """The number of the first step after the phase, counted from 0."""
        return self.first_step + self.steps

    @property
    def stop_row(self) -> int:
        """The first row after the phase."""
        return self.first_row + self.steps * self.rows_per_step

    @property
    def tokens(self) -> float:
        """Expected real tokens of the phase."""
        return (self.stop_row - self.first_row) * self.tokens_per_row


def find_problems(parameters: ParameterFields) -> Iterator[str]:
    """Yields what is wrong with the lengths and the batch tables of the phases: key, expected, found, what to do."""
    phases = parameters.phases
    if not phases:
        return
    if parameters.epochs is not None:
        yield "phases: the length of an epoch depends on the phase; give max_steps or max_tokens instead of epochs"
        return
    if parameters.data.stages:
        yield "data.stages: a run with phases names the stores of each phase in phases.N.data.train; leave stages out"
    for number, phase in enumerate(phases):
        given = [key for key in LENGTHS if getattr(phase, key) is not None]
        if len(given) > 1 or (not given and number < len(phases) - 1):
            yield f"phases.{number}: expected one of steps, tokens and share, got {' and '.join(given) or 'none'}"
            return
        if given and given[0] != phases[0].length_key:
            yield f"phases.{number}.{given[0]}: expected {phases[0].length_key}, as in phases.0, for all phases"
            return
        if phase.batch_size is not None and phase.batch_size.keys() != parameters.batch_size.keys():
            expected, got = (json.dumps(list(table)) for table in (parameters.batch_size, phase.batch_size))
            yield f"phases.{number}.batch_size: expected the nodes of batch_size, {expected}, got {got}"
    yield from _rate_problems(parameters)
    yield from _length_problems(parameters)
    shapes = [key for key in ("batch_size", "micro_batch_size") if any(getattr(each, key) for each in phases)]
    if any(each.data and each.data.sequence_length for each in phases):
        shapes.append("data.sequence_length")
    wants_one_shape = {
        "parallel.zero_stage": parameters.parallel.zero_stage is not None,
        "parallel.pp_size": parameters.parallel.pp_size > 1,
    }
    fixed = next((key for key, wants in wants_one_shape.items() if wants), None)
    if fixed and shapes:
        yield f"phases: {fixed} needs batches of one shape, but the phases change {' and '.join(shapes)}; leave one out"


def _rate_problems(parameters: ParameterFields) -> Iterator[str]:
    """Yields where a phase has another learning rate than the run, whose optimizer has a second one."""
    optimizer = parameters.optimizer
    others = [key for key, value in dict(optimizer).items() if key.endswith("_learning_rate") and value is not None]
    for number, phase in enumerate(parameters.phases):
        if others and phase.optimizer is not None and phase.optimizer.learning_rate != optimizer.learning_rate:
            yield (
                f"phases.{number}.optimizer.learning_rate: would change optimizer.{others[0]} by the same factor; set "
                "that to null, or change both with a schedule of the phase"
            )
            return


def _length_problems(parameters: ParameterFields) -> Iterator[str]:
    """Yields where the lengths of the phases do not sum up to that of the run."""
    phases = parameters.phases
    key, last_is_open = phases[0].length_key, phases[-1].length_key is None
    if key is None:
        return
    total = sum(getattr(phase, key) or 0 for phase in phases)
    run = 1.0 if key == "share" else getattr(parameters, f"max_{key}")
    of_run = "the whole run, 1" if key == "share" else f"max_{key}, {run:,}" if run is not None else ""
    open_last = "or leave out the length of the last phase, which then lasts until the end"
    if run is None and not last_is_open:
        yield f'phases: their {key} give the length of the run, too; write "max_{key}": {total}, {open_last}'
    elif run is not None and last_is_open and total >= run:
        yield (f"phases: expected fewer {key} in the phases before the last than {of_run}, got {total:,}; shorten them")
    elif run is not None and not last_is_open and not math.isclose(total, run, rel_tol=1e-9):
        yield f"phases: expected their {key} to sum up to {of_run}, got {total:,}; change one of them, {open_last}"


def changed_component(component: C, changes: Mapping[str, Any], where: str) -> C:
    """Returns `component` with the settings of a phase. Raises UserError for a setting that a phase cannot change, and
    for a wrong value; `where` is the key of the phase."""
    allowed = sorted(type(component).phase_settings)
    for key in changes:
        if key not in type(component).model_fields:
            raise UserError(f"{where}.{key}: unknown key{nearest(key, allowed)}")
        if key not in allowed:
            can = f"those that can: {', '.join(allowed)}" if allowed else f"nothing of {type(component).__name__} can"
            raise UserError(f"{where}.{key}: cannot change during a run; {can}")
    try:
        values = {**component.model_dump(mode="json"), **changes}
        return type(component).model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise UserError("\n".join(explain(error, type(component), where))) from None


def changes_of(phase: Phase, parameters: ParameterFields, number: int) -> dict[str, Any]:
    """Returns the keys of `parameters` with other values in the phase with this number, counted from 0. Raises
    UserError as `changed_component` does."""
    where = f"phases.{number}"
    changes: dict[str, Any] = {}
    if phase.data is not None:
        given = {key: value for key, value in dict(phase.data).items() if value is not None}
        changes["data"] = Data.model_construct(**{**dict(parameters.data), **given})
    for key in ("architecture", "objective"):
        if settings := getattr(phase, key):
            changes[key] = changed_component(getattr(parameters, key), settings, f"{where}.{key}")
    if phase.optimizer is not None:
        changes["optimizer"] = parameters.optimizer.model_copy(update=dict(phase.optimizer))
    for key in ("schedule", "batch_size", "micro_batch_size"):
        if (value := getattr(phase, key)) is not None:
            changes[key] = value
    return changes


def plan_phases(
    parameters: ParameterFields, rows_per_step: Sequence[int], tokens_per_row: Callable[[int, int], float]
) -> tuple[list[PhaseSpan], Length]:
    """Returns the steps of each phase, and the length of the run. Raises UserError if no step would be left for a
    phase.

    Args:
        rows_per_step: the size of the global batch in each phase.
        tokens_per_row: returns the expected real tokens of a row of a phase, from its number and its first row.
    """
    spans: list[PhaseSpan] = []
    max_steps, max_tokens = parameters.max_steps, parameters.max_tokens
    share = 0.0
    for number, phase in enumerate(parameters.phases):
        first_step, first_row = (spans[-1].stop_step, spans[-1].stop_row) if spans else (0, 0)
        rows, per_row = rows_per_step[number], tokens_per_row(number, first_row)
        share += phase.share or 0.0
        tokens_before = sum(span.tokens for span in spans)
        tokens = phase.tokens
        if number == len(parameters.phases) - 1:
            steps = max_steps - first_step if max_steps is not None else None
            tokens = None if max_tokens is None else max(0, math.floor(max_tokens - tokens_before))
        elif phase.share is not None:
            steps = None if max_steps is None else round(share * max_steps) - first_step
            tokens = None if max_tokens is None else max(0, math.floor(share * max_tokens - tokens_before))
        else:
            steps = phase.steps
        if steps is None:
            assert tokens is not None, "a length is in steps or in tokens"
            steps = math.ceil(tokens / (rows * per_row))
        if steps < 1:
            raise UserError(
                f"phases.{number}: no step is left for it: the phases before it take {first_step:,} steps and "
                f"about {tokens_before:,.0f} tokens; shorten them, or make the run longer"
            )
        spans.append(PhaseSpan(first_step, steps, first_row, rows, per_row))
    total = spans[-1].stop_step
    if max_tokens is not None:
        return spans, Length(steps=total, tokens=max_tokens, unit="tokens")
    return spans, Length(steps=total, tokens=round(sum(span.tokens for span in spans)))
