"""Numbers of batch jobs as settings and arguments, and the lines that a job's output has so far."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

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


def check_number(number: str, where: str) -> None:
    """Raises UserError if `number` is no job's number; the message begins with `where`."""
    if not re.fullmatch(r"\d+", number):
        raise UserError(f"{where}: expected a job's number or a run's folder, got {number}")
