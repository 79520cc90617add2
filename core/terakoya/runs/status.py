"""Reads the state of a run from its files alone: from another terminal, another machine, or long after its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from terakoya.errors import UserError
from terakoya.log import format_duration
from terakoya.runs import files as run_files
from terakoya.runs import metrics
from terakoya.runs.checkpoints import find_problems, list_checkpoints
from terakoya.runs.files import Lock
from terakoya.runs.forks import read_fork
from terakoya.runs.idle_starts import without_idle_starts
from terakoya.runs.metrics import Metrics

State = Literal["not started", "starting", "training", "finished", "stopped", "failed", "killed"]
END_STATES: Mapping[str, State] = {"finished": "finished", "stopped": "stopped", "error": "failed"}
"""The state after each kind of record that ends a start of the run."""
ENDS = ("finished", "stopped", "checkpoint", "fork")
"""The kinds of records after whose steps the run continues."""
WINDOW = 20
"""Number of logged steps from which the rate and the change of the loss are computed."""
QUIET_INTERVALS, QUIET_SECONDS = 10, 60.0
"""A run counts as quiet if it has written nothing for this many of its logging intervals and this many seconds."""


@dataclass(frozen=True)
class Validation:
    """The last validation on one store: its numbers by name."""

    store: str | None
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Checkpoint:
    """The last checkpoint: its name, its step, its age in seconds, and the number of checkpoints."""

    name: str
    step: int
    age: float
    kept: int


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment; unknown values are None. The field names are the keys of `status --json`.

    Attributes:
        state: `killed` if the process ended without a record, `stopped` if it saved after a stop request.
        told: the state in a sentence, with what to do if the user has to act.
        loss_change: the mean loss of the newer half of the last logged steps minus that of the older half;
            `loss_change_steps` is the number of steps from the middle of one half to the middle of the other.
        seconds_left: time to the full length at the pace of the last logged steps, saving and validation included.
        seconds_to_limit: time until `max_minutes` stops this start.
        seconds_since_word: time since the last record.
        checkpoints_gone: whether the run has saved checkpoints, and none is there any more.
        skipped_steps: the number of steps that changed no weight, because they were not finite.
        spikes: the number of spikes of the loss and of the gradient norm.
        rollbacks: how often the run went back to a checkpoint because of a spike that lasted.
        last_skipped, last_spike, last_rollback: what the record of the last one says.
        phase: what the phase under way is called, and which steps it has.
        phases: the records of all phases, in a run that has some.
        forked_from: the run and the step at which `terakoya fork` began this one.
        warnings: the texts of all warnings, oldest first.
        problems: sentences about damage to the files themselves: to the metrics, and to the last checkpoint.
    """

    folder: Path
    state: State
    told: str
    process: str | None = None
    step: int = 0
    max_steps: int | None = None
    tokens: int = 0
    max_tokens: int | None = None
    share_done: float | None = None
    phase: str | None = None
    phases: tuple[Mapping[str, Any], ...] = ()
    loss: float | None = None
    loss_change: float | None = None
    loss_change_steps: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    seconds_left: float | None = None
    seconds_to_limit: float | None = None
    seconds_since_word: float | None = None
    validations: tuple[Validation, ...] = ()
    checkpoint: Checkpoint | None = None
    checkpoints_gone: bool = False
    saving_step: int | None = None
    restarts: int = 0
    skipped_steps: int = 0
    last_skipped: str | None = None
    spikes: int = 0
    last_spike: str | None = None
    rollbacks: int = 0
    last_rollback: str | None = None
    forked_from: str | None = None
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the status as a JSON object."""
        return {**asdict(self), "folder": str(self.folder)}


def read(folder: Path, *, now: float | None = None) -> RunStatus:
    """Reads the state of the run in `folder` at `now` (seconds since 1970). Raises UserError unless `folder` is a run's
    folder."""
    now = time.time() if now is None else now
    written = without_idle_starts(metrics.read(folder))
    fork, problems = _fork(folder)
    lock, settings = run_files.read_lock(folder), run_files.read_parameters(folder)
    saved = run_files.find_checkpoints(folder)
    steps = metrics.kept_steps(written)
    starts = [*([run_files.read_manifest(saved[-1].folder)] if saved else []), *written.of_kind("start"), settings]
    unit = _last_value(starts, "length_unit")
    max_steps = None if unit == "tokens" else _last_value(starts, "max_steps")
    max_tokens = _last_value([settings], "max_tokens") or (
        _last_value(starts, "max_tokens") if unit == "tokens" else None
    )
    phases: tuple[Mapping[str, Any], ...] = tuple(_last_value(starts[:-1], "phases") or ())
    skipped, spikes, rollbacks = (metrics.anomalies(written, kind) for kind in ("skipped", "spike", "rollback"))
    state, sentence = _state(written, lock, steps, now)
    step, tokens = _position(written, steps)
    last = steps[-1] if steps else {}
    change = _loss_change(steps)
    left = _seconds_left(_since_start(written, steps), step, tokens, max_steps, max_tokens)
    last_time = written.records[-1].get("time") if written.records else None
    alive = lock.held
    limit = settings.get("max_minutes")
    done = (step / max_steps) if max_steps else (tokens / max_tokens if max_tokens else None)
    return RunStatus(
        folder=folder,
        state=state,
        told=sentence,
        process=lock.holder if alive else None,
        step=step,
        max_steps=max_steps,
        tokens=tokens,
        max_tokens=max_tokens,
        share_done=None if done is None else min(1.0, done),
        phase=_phase(phases, step),
        phases=phases,
        loss=last.get("loss"),
        loss_change=change[0] if change else None,
        loss_change_steps=change[1] if change else None,
        values={name: value for name, value in last.items() if _is_value(name, value)},
        seconds_left=max(0.0, left - (now - last_time)) if alive and left is not None and last_time else None,
        seconds_to_limit=max(0.0, lock.since + 60 * limit - now) if alive and limit and lock.since else None,
        seconds_since_word=None if last_time is None else max(0.0, now - last_time),
        validations=_validations(written, step),
        checkpoint=Checkpoint(saved[-1].folder.name, saved[-1].step, max(0.0, now - saved[-1].time), len(saved))
        if saved
        else None,
        checkpoints_gone=not saved and _has_saved(written),
        saving_step=run_files.saving_step(folder) if alive else None,
        restarts=max(
            0, len(written.of_kind("resume")) - len(written.of_kind("rollback")) - (fork is not None)
        ),  # a process that goes back resumes, too
        skipped_steps=len(skipped),
        last_skipped=_last_text(skipped),
        spikes=len(spikes),
        last_spike=_last_text(spikes),
        rollbacks=len(rollbacks),
        last_rollback=_last_text(rollbacks),
        forked_from=fork,
        warnings=tuple(str(record.get("text")) for record in written.of_kind("warning")),
        problems=(
            *(problem for problem in written.problems() if not (alive and "truncated" in problem)),
            *_checkpoint_problems(folder / "checkpoints"),
            *problems,
        ),
    )


def _fork(folder: Path) -> tuple[str | None, list[str]]:
    """Returns what a fork was made of, if the run is one, and a sentence if its record is damaged."""
    try:
        fork = read_fork(folder)
    except UserError as error:
        return None, [str(error)]
    return (fork.describe() if fork else None), []


def _checkpoint_problems(checkpoints: Path) -> list[str]:
    """Returns a sentence if the newest checkpoint is damaged or cannot be read now.

    Only reads its manifest and the sizes of its files; `terakoya verify` reads everything.
    """
    try:
        for _, folder in list_checkpoints(checkpoints)[-1:]:
            if problems := find_problems(folder, hashed=()):
                return [f"{folder.name} is damaged: {'; '.join(problems[:3])}"]
    except UserError as error:
        return [str(error)]
    return []


def _has_saved(written: Metrics) -> bool:
    """Returns whether the run has saved a checkpoint, since it started over if it did."""
    has_saved = False
    for record in written.records:
        started_over = record.get("kind") == "resume" and record.get("folder") is None
        has_saved = not started_over and (has_saved or record.get("kind") == "checkpoint")
    return has_saved


def _state(written: Metrics, lock: Lock, steps: Sequence[Mapping[str, Any]], now: float) -> tuple[State, str]:
    """Returns the state, and the sentence that describes it."""
    boundaries = [record for record in written.records if record.get("kind") in {*END_STATES, "start", "resume"}]
    boundary: Mapping[str, Any] = boundaries[-1] if boundaries else {}
    end_state = END_STATES.get(boundary.get("kind", ""))
    if lock.held:
        fresh = [step for step in _since_start(written, steps) if step.get("time", 0) >= (lock.since or 0) - 1]
        if end_state or not fresh:
            return "starting", f"starting: {lock.holder} holds the run, no step is logged yet"
        last_time, interval = written.records[-1].get("time", now), _interval(fresh)
        if interval and now - last_time > max(QUIET_SECONDS, QUIET_INTERVALS * interval):
            return "training", (
                f"training, but quiet: nothing was written for {format_duration(now - last_time)}, "
                f"a step was logged every {format_duration(interval)}; {lock.holder} is alive"
            )
        return "training", f"training: {lock.holder}"
    if all(record.get("kind") == "fork" for record in written.records):
        return "not started", "not started: nothing is written yet and no process holds the run"
    if end_state == "finished":
        reason = boundary.get("reason")
        return end_state, f"finished early: {reason}" if reason else "finished"
    if end_state == "stopped":
        return end_state, f"stopped by {boundary.get('reason') or 'a request'}; the same command continues the run"
    if end_state == "failed":
        return end_state, f"failed: {boundary.get('text')}"
    return "killed", (
        f"killed: the process ended without a record ({lock.holder or 'it left no name'}); the same command continues "
        "from the last checkpoint"
    )


def _position(written: Metrics, steps: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Returns the steps and tokens done according to the records."""
    logged = [(int(record.get("step") or 0), int(record.get("tokens") or 0)) for record in steps[-1:]]
    ends = [record for record in written.records[-3:] if record.get("kind") in ENDS]
    last = max((int(record.get("step") or 0) for record in ends), default=0)
    step, tokens = logged[0] if logged else (0, 0)
    return max(step, last), tokens


def _since_start(written: Metrics, steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns those of `steps` that the last start of the run logged."""
    starts = [index for index, record in enumerate(written.records) if record.get("kind") in ("start", "resume")]
    since = {id(record) for record in written.records[starts[-1] if starts else 0 :]}
    return [record for record in steps if id(record) in since]


def _interval(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean seconds between logged steps."""
    times = [record["time"] for record in steps[-WINDOW:] if "time" in record]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _phase(phases: Sequence[Mapping[str, Any]], step: int) -> str | None:
    """Returns the phase of the step after `step` finished ones; None in a run without phases."""
    for phase in phases:
        last = phase["first_step"] + phase["steps"]
        if step < last or phase is phases[-1]:
            name = f", {phase['name']}" if phase["name"] else ""
            return f"{phase['number']} of {len(phases)}{name}: steps {phase['first_step'] + 1:,} to {last:,}"
    return None


def _seconds_left(
    steps: Sequence[Mapping[str, Any]], step: int, tokens: int, max_steps: int | None, max_tokens: int | None
) -> float | None:
    """Returns the seconds from the last logged step to the end of the run."""
    recent = [record for record in steps[-WINDOW:] if "time" in record]
    if len(recent) < 2:
        return None
    seconds = recent[-1]["time"] - recent[0]["time"]
    unit, done, total = ("tokens", tokens, max_tokens) if max_tokens else ("step", step, max_steps)
    progress = (recent[-1].get(unit) or 0) - (recent[0].get(unit) or 0)
    return None if total is None or progress <= 0 else max(0, total - done) * seconds / progress


def _loss_change(steps: Sequence[Mapping[str, Any]]) -> tuple[float, int] | None:
    """Returns `loss_change` and `loss_change_steps` of `RunStatus`."""
    recent = [record for record in steps[-WINDOW:] if isinstance(record.get("loss"), float)]
    half = len(recent) // 2
    if not half:
        return None
    older, newer = recent[-2 * half : -half], recent[-half:]
    mean = [sum(record["loss"] for record in part) / half for part in (older, newer)]
    middle = [sum(record.get("step") or 0 for record in part) / half for part in (older, newer)]
    return mean[1] - mean[0], round(middle[1] - middle[0])


def _validations(written: Metrics, step: int) -> tuple[Validation, ...]:
    """Returns the last validation of each store, ignoring steps that a resumed run has not reached again."""
    last: dict[str | None, Validation] = {}
    for record in written.of_kind("validation"):
        if int(record.get("step") or 0) <= step:
            values = {name: value for name, value in record.items() if _is_value(name, value)}
            last[record.get("store")] = Validation(record.get("store"), int(record.get("step") or 0), values)
    return tuple(last.values())


def _is_value(name: str, value: Any) -> bool:
    return name not in metrics.NON_METRIC_KEYS and isinstance(value, int | float)


def _last_text(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the step of the last of `records` and what was found in it, else None."""
    return f"step {records[-1].get('step') or 0:,}: {records[-1].get('text')}" if records else None


def _last_value(records: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Returns the value of `name` in the last of `records` that has it, else None."""
    return next((record[name] for record in reversed(records) if record.get(name) is not None), None)
