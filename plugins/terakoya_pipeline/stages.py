"""Pipeline stages that run once: a record next to each output says what the output was made from.

The record of `work/store` is `work/.store.stage.json`, so that the output folder itself has no foreign files.

See docs/design/pipelines.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terakoya.atomic_files import write_text
from terakoya.errors import UserError
from terakoya.json_settings import short_json
from terakoya.log import translated

logger = logging.getLogger("terakoya")

_HASHED_BYTES = 4 << 20  # larger files count by name and size only, so that the check stays cheap


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        name: the stage's name in messages.
        key: the pipeline's key for its output.
        out: the folder that it makes.
        inputs: returns its settings and inputs as JSON values.
        make: makes `out` and returns facts about it. Unless `resumes`, an incomplete output never has the name `out`.
        resumes: `make` continues from an existing `out`, and itself raises an error if it cannot.
        upgrade: converts the inputs that an earlier version recorded to what `inputs` would return for them today, so
            that a new setting with its default value is not a change.
        check: raises UserError where `make` would not continue from `out`, which was made from other inputs.
    """

    name: str
    key: str
    out: Path
    inputs: Callable[[], Mapping[str, Any]]
    make: Callable[[], Mapping[str, Any]]
    resumes: bool = False
    upgrade: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class StageResult:
    """The result of a stage: whether it was `skipped` because it was finished, else its seconds, and its facts."""

    name: str
    out: Path
    skipped: bool
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def run_stages(stages: Sequence[Stage], *, redo: bool = False) -> Iterator[StageResult]:
    """Makes every stage whose output is missing, in order; yields the result of each. With `redo`, outputs that do not
    match their settings are moved aside (`store` to `store.old-1`) and made again. Raises UserError if an output was
    not made by this pipeline, was changed since, or was made from other settings; and before a stage is made that would
    leave a later output out of date."""
    for stage in stages:
        if not stage.resumes and stage.out.exists() and _read(stage) is None and not redo:
            raise UserError(f"{stage.out}: already exists and was not made by this pipeline; {_remedy(stage)}")
    for index, stage in enumerate(stages):
        yield _run(stage, stages[index + 1 :], redo)


def _run(stage: Stage, later: Sequence[Stage], redo: bool) -> StageResult:
    inputs = json.loads(json.dumps(stage.inputs(), default=str))
    record = _read(stage)
    outdated_inputs: Mapping[str, Any] | None = None
    if stage.out.exists():
        mismatch = None if record is None and stage.resumes else _mismatch(stage, record, inputs)
        if record is not None and mismatch is None and (record["finished"] or not stage.resumes):
            if not record["finished"]:  # interrupted between moving the output into place and recording it
                _write(stage, inputs, facts={}, seconds=0.0, finished=True)
            elif record["made_from"] != inputs:  # equal after `upgrade`: record today's form for the next comparison
                _write(stage, inputs, facts=record["facts"], seconds=record["seconds"], finished=True)
            return StageResult(stage.name, stage.out, True, record["seconds"], record["facts"])
        if mismatch is not None and redo:
            _move_aside(stage)
        elif mismatch is not None and not stage.resumes:
            raise UserError(f"{stage.out}: {mismatch}; {_remedy(stage)}")
        elif mismatch is not None:
            stage.check()
            logger.info(
                "%s: %s %s; if it cannot continue from that, %s", stage.name, stage.out, mismatch, _remedy(stage)
            )
            outdated_inputs = record["made_from"] if record is not None else None
    for other in later:
        if other.out.exists() and not other.resumes and not redo:
            raise UserError(f"{other.out}: {_outdated_by(stage, other)}")
    stage.out.parent.mkdir(parents=True, exist_ok=True)
    _write(stage, inputs, facts={}, seconds=0.0, finished=False)
    if stage.out.exists():
        logger.info("%s: continues %s", translated(stage.name), stage.out)
    else:
        logger.info("%s: makes %s", translated(stage.name), stage.out)
    start = time.perf_counter()
    try:
        facts = json.loads(json.dumps(stage.make(), default=str))
    except UserError:
        if outdated_inputs is not None:  # the stage refused: restore the record of the output, for --redo to move aside
            _write(stage, outdated_inputs, facts={}, seconds=0.0, finished=False)
        raise
    seconds = time.perf_counter() - start
    _write(stage, inputs, facts=facts, seconds=seconds, finished=True)
    return StageResult(stage.name, stage.out, False, seconds, facts)


def content_digest(folder: Path) -> str:
    """Returns a hash of the names and sizes of all files in `folder`, and of the contents of files up to 4 MiB."""
    facts = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = file.stat().st_size
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if size <= _HASHED_BYTES else ""
        facts.append([file.relative_to(folder).as_posix(), size, digest])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Returns the differences between two JSON values, each as `key.path: old -> new`. The hash of a corpus is left out
    where `clean` beside it differs, on which it depends, too."""
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(each, dict) for each in (*old, *new)):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in [*old, *(key for key in new if key not in old)]:
            if key != "corpus" or old.get("clean") == new.get("clean"):
                changes += differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
        return changes
    if old == new:
        return []
    return [f"{path}: {short_json(old)} -> {short_json(new)}"]


def _record_file(stage: Stage) -> Path:
    return stage.out.with_name(f".{stage.out.name}.stage.json")


def _read(stage: Stage) -> dict[str, Any] | None:
    file = _record_file(stage)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{file}: cannot be read ({error}); delete it and {stage.out}") from error
    return record if record.get("stage") == stage.name else None


def _write(
    stage: Stage, inputs: Mapping[str, Any], *, facts: Mapping[str, Any], seconds: float, finished: bool
) -> None:
    content = content_digest(stage.out) if finished and not stage.resumes else None
    record = {
        "stage": stage.name,
        "finished": finished,
        "seconds": round(seconds, 3),
        "made_from": inputs,
        "content": content,
        "facts": facts,
    }
    file = _record_file(stage)
    write_text(file, json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def _mismatch(stage: Stage, record: Mapping[str, Any] | None, inputs: Mapping[str, Any]) -> str | None:
    """Returns why the existing output cannot be used, or None if it can."""
    if record is None:
        return "already exists and was not made by this pipeline"
    changes = differences(record["made_from"], inputs)
    if changes:
        changes = differences(json.loads(json.dumps(stage.upgrade(record["made_from"]), default=str)), inputs)
    if changes:
        return "was made from other settings: " + "; ".join(changes)
    if record["content"] is not None and record["content"] != content_digest(stage.out):
        return "was changed after it was made"
    return None


def _remedy(stage: Stage) -> str:
    return f'give another folder as "{stage.key}", delete this one, or use --redo, which moves it aside'


def _outdated_by(stage: Stage, later: Stage) -> str:
    """Returns why the output of `later` must go before `stage` is made, and how."""
    if not (stage.resumes and stage.out.exists()):
        return f"would be out of date once {stage.out} is made; {_remedy(later)}"
    return (
        f'would be out of date once {stage.out} continues; give another folder as "{later.key}" or delete this one. '
        f"--redo would move {stage.out} aside too, and make it again from the beginning"
    )


def _move_aside(stage: Stage) -> None:
    number = 1
    while (aside := stage.out.with_name(f"{stage.out.name}.old-{number}")).exists():
        number += 1
    stage.out.rename(aside)
    _record_file(stage).unlink(missing_ok=True)
    logger.info("%s: %s moved aside to %s", stage.name, stage.out, aside)
