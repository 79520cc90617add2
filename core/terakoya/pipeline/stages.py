"""Steps that are made once: each output has a record beside it of what it was made from.

`work/store` is recorded in `work/.store.stage.json`: the output itself holds nothing that is not its own.
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

from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

_HASHED_BYTES = 4 << 20  # larger files count by name and size only, so that looking costs nothing


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline.

    Attributes:
        name: what it is called in messages.
        key: the pipeline's key that names its output.
        out: the folder it makes.
        made_from: a function that returns its settings and inputs, as JSON values.
        make: makes `out` and returns facts about it. Half-made outputs never bear the name `out`, unless `resumes`.
        resumes: `make` goes on with what is there and itself refuses what it cannot go on with.
        up_to_date: a function that turns what `made_from` returned in an earlier version into what it would return for
            the same today: a setting that has come since then, and is not given, is no change.
    """

    name: str
    key: str
    out: Path
    made_from: Callable[[], Mapping[str, Any]]
    make: Callable[[], Mapping[str, Any]]
    resumes: bool = False
    up_to_date: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict


@dataclass(frozen=True)
class StageResult:
    """What became of a stage: found finished (`skipped`) or made in `seconds`, and the facts it reported."""

    name: str
    out: Path
    skipped: bool
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def run_stages(stages: Sequence[Stage], *, redo: bool = False) -> Iterator[StageResult]:
    """Makes every stage whose output is not there, in order; yields each as it is done.

    With `redo`, outputs that no longer fit their settings are moved aside (`store` to `store.old-1`) and made again.

    Raises UserError for an output that this pipeline did not make, that was changed since, or that was made from other
    settings; before a stage is made that would leave a later output out of date.
    """
    for stage in stages:
        if not stage.resumes and stage.out.exists() and _read(stage) is None and not redo:
            raise UserError(f"{stage.out}: is there already and was not made by this pipeline; {_remedy(stage)}")
    for index, stage in enumerate(stages):
        yield _run(stage, stages[index + 1 :], redo)


def _run(stage: Stage, later: Sequence[Stage], redo: bool) -> StageResult:
    made_from = json.loads(json.dumps(stage.made_from(), default=str))
    record = _read(stage)
    outdated: Mapping[str, Any] | None = None
    if stage.out.exists():
        complaint = None if record is None and stage.resumes else _complaint(stage, record, made_from)
        if record is not None and complaint is None and (record["finished"] or not stage.resumes):
            if not record["finished"]:  # stopped between putting the output in place and recording it
                _write(stage, made_from, facts={}, seconds=0.0, finished=True)
            elif record["made_from"] != made_from:  # as good as new: noted, so that the next change is seen
                _write(stage, made_from, facts=record["facts"], seconds=record["seconds"], finished=True)
            logger.info("%s: %s is there, made from the same settings: skipped", stage.name, stage.out)
            return StageResult(stage.name, stage.out, True, record["seconds"], record["facts"])
        if complaint is not None and redo:
            _move_aside(stage)
        elif complaint is not None and not stage.resumes:
            raise UserError(f"{stage.out}: {complaint}; {_remedy(stage)}")
        elif complaint is not None:
            logger.info("%s: %s %s; if it cannot go on with that, %s", stage.name, stage.out, complaint, _remedy(stage))
            outdated = record["made_from"] if record is not None else None
    for other in later:
        if other.out.exists() and not other.resumes and not redo:
            raise UserError(f"{other.out}: would be out of date once {stage.out} is made; {_remedy(other)}")
    stage.out.parent.mkdir(parents=True, exist_ok=True)
    _write(stage, made_from, facts={}, seconds=0.0, finished=False)
    logger.info("%s: %s %s", stage.name, "goes on with" if stage.out.exists() else "makes", stage.out)
    start = time.perf_counter()
    try:
        facts = json.loads(json.dumps(stage.make(), default=str))
    except UserError:
        if outdated is not None:  # it was refused: what is there is still what it was, for --redo to move aside
            _write(stage, outdated, facts={}, seconds=0.0, finished=False)
        raise
    seconds = time.perf_counter() - start
    _write(stage, made_from, facts=facts, seconds=seconds, finished=True)
    return StageResult(stage.name, stage.out, False, seconds, facts)


def content_digest(folder: Path) -> str:
    """A hash of the names and sizes of all files in `folder`, and of the contents of those up to 4 MiB."""
    facts = []
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        size = file.stat().st_size
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if size <= _HASHED_BYTES else ""
        facts.append([file.relative_to(folder).as_posix(), size, digest])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """What differs between two JSON values, one `key.path: old -> new` each."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in [*old, *(key for key in new if key not in old)]:
            found += differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
        return found
    if old == new:
        return []
    return [f"{path}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _record_file(stage: Stage) -> Path:
    return stage.out.with_name(f".{stage.out.name}.stage.json")


def _read(stage: Stage) -> dict[str, Any] | None:
    file = _record_file(stage)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error}); delete it and {stage.out}") from error
    return record if record.get("stage") == stage.name else None


def _write(
    stage: Stage, made_from: Mapping[str, Any], *, facts: Mapping[str, Any], seconds: float, finished: bool
) -> None:
    content = content_digest(stage.out) if finished and not stage.resumes else None
    record = {
        "stage": stage.name,
        "finished": finished,
        "seconds": round(seconds, 3),
        "made_from": made_from,
        "content": content,
        "facts": facts,
    }
    file = _record_file(stage)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def _complaint(stage: Stage, record: Mapping[str, Any] | None, made_from: Mapping[str, Any]) -> str | None:
    """Why the output that is there does not do, or None."""
    if record is None:
        return "is there already and was not made by this pipeline"
    changed = differences(record["made_from"], made_from)
    if changed:
        changed = differences(json.loads(json.dumps(stage.up_to_date(record["made_from"]), default=str)), made_from)
    if changed:
        return "was made from other settings: " + "; ".join(changed)
    if record["content"] is not None and record["content"] != content_digest(stage.out):
        return "was changed after it was made"
    return None


def _remedy(stage: Stage) -> str:
    return f'give another folder as "{stage.key}", delete this one, or start with --redo, which moves it aside'


def _move_aside(stage: Stage) -> None:
    number = 1
    while (aside := stage.out.with_name(f"{stage.out.name}.old-{number}")).exists():
        number += 1
    stage.out.rename(aside)
    _record_file(stage).unlink(missing_ok=True)
    logger.info("%s: %s moved aside to %s", stage.name, stage.out, aside)
