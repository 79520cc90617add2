"""Batch jobs of schedulers: their numbers as settings and arguments, and the lines that their output has so far."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from terakoya.errors import UserError


def read_lines(file: Path, start: int) -> tuple[list[str], int]:
    """Returns the whole lines of `file` from the byte `start` on, and the byte after them."""
    with file.open("rb") as stream:
        stream.seek(start)
        new = stream.read()
    whole = new[: new.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), start + len(whole)


def _are_jobs(value: str) -> str:
    if re.fullmatch(r"\d+(,\d+)*", value):
        return value
    raise ValueError(f'expected job numbers, such as 120 or 120,121, got "{value}"')


JobNumbers = Annotated[str, AfterValidator(_are_jobs)]


class BatchJob:
    """The job `number` of a scheduler. `SubmittedJob` says what each method of a subclass does."""

    where: ClassVar[str]
    """The beginning of messages: `launch` and the launcher's name."""

    def __init__(self, number: str) -> None:
        if not re.fullmatch(r"\d+", number):
            raise UserError(f"{self.where}: expected a job's number or a run's folder, got {number}")
        self.number = number
        self._read = 0

    def fetch(self, out: Path) -> str:
        """Raises UserError: there is nothing to copy."""
        raise UserError(
            f"{self.where} fetch: the run's folder is on a shared file system: terakoya export RUN --out DIR"
        )
