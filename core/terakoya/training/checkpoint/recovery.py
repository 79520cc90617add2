"""Finds the checkpoint from which a run continues, and sets aside what is damaged.

What cannot be read now is never moved, and a run that has had a checkpoint never starts again at step 0 unless the user
says so.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from terakoya.errors import TemporaryFailure, UserError
from terakoya.runs import forks, metrics
from terakoya.runs.checkpoints import NAME, find_newest_whole, reading
from terakoya.runs.forks import read_fork

log = logging.getLogger("terakoya")
QUARANTINE = "quarantine"
PAUSES = (1.0, 3.0, 9.0)
"""Seconds before each further attempt to read checkpoints that cannot be read."""
SHOWN_PROBLEMS = 3


def recover_newest(checkpoints: Path, *, start_over: bool = False) -> tuple[Path | None, list[str]]:
    """Cleans up after interrupted saves and returns the newest whole checkpoint, if any, and messages for the user.

    Removes leftovers of killed processes and moves damaged checkpoints to `quarantine/`. Only one process may call it.

    Args:
        checkpoints: the folder of that name in a run's folder.
        start_over: whether the run may begin at step 0 although it has had checkpoints.

    Raises:
        TemporaryFailure: a checkpoint cannot be read now, after several attempts, and nothing was moved; or a folder
            cannot be moved or removed.
        UserError: the run has had checkpoints and none is whole, or a newer version wrote one; nothing was moved.
    """
    newest, damaged = _find_patiently(checkpoints)
    if newest is None and not start_over:
        with reading(checkpoints):
            traces = _find_traces(checkpoints, damaged)
        if traces:
            raise UserError(
                f"{checkpoints.parent}: this run has had checkpoints, and none of them is whole:\n  "
                + "\n  ".join(traces)
                + "\nBring one back, move this folder away, or choose another --out; `terakoya train --start-over` "
                "trains from step 0 in this folder"
            )
    messages = []
    for leftover in sorted([*checkpoints.glob(".staging-*"), *checkpoints.glob(".removing-*")]):
        with _changing(leftover):
            if leftover.is_symlink() or not leftover.is_dir():
                leftover.unlink()
            else:
                shutil.rmtree(leftover)
        messages.append(f"removed {leftover.name}, left by an interrupted save")
    for folder, problems in damaged.items():
        messages.append(f"{describe_damage(folder, problems)}; moved to {move_to_quarantine(folder)}")
    return newest, messages


def describe_damage(folder: Path, problems: Sequence[str]) -> str:
    """Returns a sentence about a damaged checkpoint."""
    return f"{folder.name} is damaged ({'; '.join(problems[:SHOWN_PROBLEMS])})"


def _find_patiently(checkpoints: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """Returns what `find_newest_whole` does, after several attempts where the file system fails."""
    for pause in PAUSES:
        try:
            return find_newest_whole(checkpoints)
        except TemporaryFailure as error:
            log.warning("%s; the next attempt is in %g s", error, pause)
            time.sleep(pause)
    try:
        return find_newest_whole(checkpoints)
    except TemporaryFailure as error:
        raise TemporaryFailure(
            f"{error}, and nothing was moved: give the same command again. If it can never be read again, move its "
            "checkpoint away by hand; the run then continues from the one before"
        ) from error


def _find_traces(checkpoints: Path, damaged: Mapping[Path, Sequence[str]]) -> list[str]:
    """Returns what shows that a run without a whole checkpoint has had some, a line for each.

    What is older than the last consent to start over does not count.
    """
    traces = [describe_damage(folder, problems) for folder, problems in damaged.items()]
    entries = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    traces += [
        f"{path.name} is no folder, or a link to one; a checkpoint must be in a folder of its own"
        for path in entries
        if NAME.fullmatch(path.name) and path not in damaged
    ]
    has_log = (checkpoints.parent / metrics.FILE).is_file()
    records = metrics.read(checkpoints.parent).records if has_log else ()
    consents = [number for number, record in enumerate(records) if _is_consent(record)]
    saved = [record for record in records[consents[-1] if consents else 0 :] if record.get("kind") == "checkpoint"]
    if saved:
        traces.append(f"{metrics.FILE} records a checkpoint of step {saved[-1].get('step')}")
    if not consents and (fork := read_fork(checkpoints.parent)) is not None:
        traces.append(f"{forks.FILE} says that it began at step {fork.step} of another run")
    quarantine = checkpoints / QUARANTINE
    if not consents and quarantine.is_dir() and (names := sorted(path.name for path in quarantine.iterdir())):
        traces.append(f"{QUARANTINE}/ holds {', '.join(names)}")
    return traces


def _is_consent(record: Mapping[str, object]) -> bool:
    """Whether a record of `metrics.jsonl` says that the run started over at step 0."""
    return record.get("kind") == "resume" and record.get("folder", "") is None


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block, which moves or removes `path`, into a TemporaryFailure."""
    try:
        yield
    except OSError as error:
        raise TemporaryFailure(f"{path}: cannot be moved or removed now: {error}; move it away by hand") from error


def move_to_quarantine(folder: Path) -> Path:
    """Moves the damaged checkpoint `folder` and returns where it is now.

    Raises:
        UserError: `quarantine` is not a folder.
        TemporaryFailure: the file system refuses.
    """
    target = folder.parent / QUARANTINE / folder.name
    with _changing(folder):
        try:
            target.parent.mkdir(exist_ok=True)
        except FileExistsError:
            raise UserError(
                f"{target.parent}: expected a folder for damaged checkpoints, found a file; move it away"
            ) from None
        while target.exists():
            target = target.with_name(target.name + "+")
        folder.rename(target)
    return target
