"""What a run is doing, told from its files alone: from another terminal, another machine, or long after."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from terakoya.runs import files as run_files
from terakoya.runs import metrics
from terakoya.runs.files import Lock
from terakoya.runs.metrics import Metrics

State = Literal["not started", "starting", "training", "finished", "stopped", "failed", "killed"]
ENDS: Mapping[str, State] = {"finished": "finished", "stopped": "stopped", "error": "failed"}
"""Kinds of records that end a start of the run."""
WINDOW = 20
"""How many logged steps the rate is taken from, and the change of the loss."""
QUIET_INTERVALS, QUIET_SECONDS = 10, 60.0
"""A run that has written nothing for so many of its own intervals, and for so long, is said to be quiet."""


@dataclass(frozen=True)
class Validation:
    """The last validation on one store: its numbers by name."""

    store: str | None
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Checkpoint:
    """The last checkpoint: its name, its step, its age in seconds, and how many there are."""

    name: str
    step: int
    age: float
    kept: int


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. What is not known is None.

    Attributes:
        state: `killed` is a process that is gone without a word, `stopped` one that was asked to and saved.
        told: the state in a sentence, with what to do where something is to be done.
        loss_change: the mean loss of the newer half of the last logged steps less that of the older half, and
            `loss_change_steps` the steps from the middle of one to the middle of the other.
        seconds_left: until the run's length, at the pace of the last logged steps, saving and validating included.
        seconds_to_limit: until `max_minutes` stops this start.
        warnings: the texts of all, oldest first; `problems` is what is wrong with the files themselves.
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
    loss: float | None = None
    loss_change: float | None = None
    loss_change_steps: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    seconds_left: float | None = None
    seconds_to_limit: float | None = None
    seconds_since_word: float | None = None
    validations: tuple[Validation, ...] = ()
    checkpoint: Checkpoint | None = None
    saving_step: int | None = None
    restarts: int = 0
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read(folder: Path, *, now: float | None = None) -> RunStatus:
    """The state of the run in `folder`, at `now` (seconds since 1970).

    Raises:
        UserError: `folder` is no run.
    """
    now = time.time() if now is None else now
    written = metrics.read(folder)
    lock, settings = run_files.lock(folder), run_files.parameters(folder)
    saved = run_files.checkpoints(folder)
    steps = metrics.kept_steps(written)
    starts = [*written.of("start"), *([run_files.manifest(saved[-1])] if saved else []), settings]
    unit = _first(starts, "length_unit")
    max_steps = None if unit == "tokens" else _first(starts, "max_steps")
    max_tokens = _first([settings], "max_tokens") or (_first(starts, "max_tokens") if unit == "tokens" else None)
    state, told = _state(written, lock, steps, now)
    step, tokens = _position(written, steps)
    last = steps[-1] if steps else {}
    change = _change(steps)
    left = _seconds_left(_since_start(written, steps), step, tokens, max_steps, max_tokens)
    word = written.records[-1].get("time") if written.records else None
    alive = lock.held
    limit = settings.get("max_minutes")
    done = (step / max_steps) if max_steps else (tokens / max_tokens if max_tokens else None)
    return RunStatus(
        folder=folder,
        state=state,
        told=told,
        process=lock.holder if alive else None,
        step=step,
        max_steps=max_steps,
        tokens=tokens,
        max_tokens=max_tokens,
        share_done=None if done is None else min(1.0, done),
        loss=last.get("loss"),
        loss_change=change[0] if change else None,
        loss_change_steps=change[1] if change else None,
        values={name: value for name, value in last.items() if _is_value(name, value)},
        seconds_left=max(0.0, left - (now - word)) if alive and left is not None and word else None,
        seconds_to_limit=max(0.0, lock.since + 60 * limit - now) if alive and limit and lock.since else None,
        seconds_since_word=None if word is None else max(0.0, now - word),
        validations=_validations(written, step),
        checkpoint=Checkpoint(saved[-1].folder.name, saved[-1].step, max(0.0, now - saved[-1].time), len(saved))
        if saved
        else None,
        saving_step=run_files.saving(folder) if alive else None,
        restarts=len(written.of("resume")),
        warnings=tuple(str(record.get("text")) for record in written.of("warning")),
        problems=tuple(problem for problem in written.problems() if not (alive and "cut off" in problem)),
    )


def _state(written: Metrics, lock: Lock, steps: Sequence[Mapping[str, Any]], now: float) -> tuple[State, str]:
    """The state, and the sentence that tells it."""
    ends = [record for record in written.records if record.get("kind") in {*ENDS, "start", "resume"}]
    end: Mapping[str, Any] = ends[-1] if ends else {}
    ended = ENDS.get(end.get("kind", ""))
    if lock.held:
        fresh = [step for step in _since_start(written, steps) if step.get("time", 0) >= (lock.since or 0) - 1]
        if ended or not fresh:
            return "starting", f"starting: {lock.holder} has it, no step is logged yet"
        word, interval = written.records[-1].get("time", now), _interval(fresh)
        if interval and now - word > max(QUIET_SECONDS, QUIET_INTERVALS * interval):
            return "training", (
                f"training, but quiet: nothing was written for {duration(now - word)}, "
                f"a step was logged every {duration(interval)}; {lock.holder} lives"
            )
        return "training", f"training: {lock.holder}"
    if not written.records:
        return "not started", "not started: nothing is written yet and no process has it"
    if ended == "finished":
        return ended, "finished"
    if ended == "stopped":
        return ended, f"stopped by {end.get('reason') or 'a request'}; the same command goes on"
    if ended == "failed":
        return ended, f"failed: {end.get('text')}"
    return "killed", (
        f"killed: the process is gone without a word ({lock.holder or 'it left no name'}); the same command goes on "
        "from the last checkpoint"
    )


def _position(written: Metrics, steps: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Steps and tokens done as far as they are written down."""
    at = [(int(record.get("step") or 0), int(record.get("tokens") or 0)) for record in steps[-1:]]
    ends = [record for record in written.records[-3:] if record.get("kind") in ("finished", "stopped", "checkpoint")]
    last = max((int(record.get("step") or 0) for record in ends), default=0)
    step, tokens = at[0] if at else (0, 0)
    return max(step, last), tokens


def _since_start(written: Metrics, steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of `steps` that the last start of the run has logged."""
    starts = [index for index, record in enumerate(written.records) if record.get("kind") in ("start", "resume")]
    mine = {id(record) for record in written.records[starts[-1] if starts else 0 :]}
    return [record for record in steps if id(record) in mine]


def _interval(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds between logged steps."""
    times = [record["time"] for record in steps[-WINDOW:] if "time" in record]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _seconds_left(
    steps: Sequence[Mapping[str, Any]], step: int, tokens: int, max_steps: int | None, max_tokens: int | None
) -> float | None:
    """From the last logged step to the end of the run."""
    recent = [record for record in steps[-WINDOW:] if "time" in record]
    if len(recent) < 2:
        return None
    seconds = recent[-1]["time"] - recent[0]["time"]
    name, done, whole = ("tokens", tokens, max_tokens) if max_tokens else ("step", step, max_steps)
    came = recent[-1].get(name, 0) - recent[0].get(name, 0)
    return None if whole is None or came <= 0 else max(0, whole - done) * seconds / came


def _change(steps: Sequence[Mapping[str, Any]]) -> tuple[float, int] | None:
    recent = [record for record in steps[-WINDOW:] if isinstance(record.get("loss"), float)]
    half = len(recent) // 2
    if not half:
        return None
    older, newer = recent[-2 * half : -half], recent[-half:]
    mean = [sum(record["loss"] for record in part) / half for part in (older, newer)]
    middle = [sum(record["step"] for record in part) / half for part in (older, newer)]
    return mean[1] - mean[0], round(middle[1] - middle[0])


def _validations(written: Metrics, step: int) -> tuple[Validation, ...]:
    """The last of each store, none of a step that was not reached again."""
    last: dict[str | None, Validation] = {}
    for record in written.of("validation"):
        if int(record.get("step") or 0) <= step:
            values = {name: value for name, value in record.items() if _is_value(name, value)}
            last[record.get("store")] = Validation(record.get("store"), int(record.get("step") or 0), values)
    return tuple(last.values())


def _is_value(name: str, value: Any) -> bool:
    return name not in metrics.NO_CURVES and isinstance(value, int | float)


def _first(records: Sequence[Mapping[str, Any]], name: str) -> Any:
    """`name` of the last record of a start that has it, else of the others."""
    return next((record[name] for record in reversed(records) if record.get(name) is not None), None)


def duration(seconds: float) -> str:
    """A time as it is said: 42 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
