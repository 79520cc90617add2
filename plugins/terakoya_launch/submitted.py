"""The record of a submitted job in the folder of its plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from terakoya.atomic_files import write_text

FILE = "submitted.json"
"""The file in a plan's folder with the last job that was submitted from it."""


@dataclass(frozen=True)
class SubmittedJobRecord:
    """A job that was submitted, as the plan's folder records it.

    Attributes:
        launcher: the name of the launcher that submitted it.
        job: the identifier that the scheduler or service gave it: a job number, an ARN.
        run: the run's folder, as this machine names it, or its place.
    """

    launcher: str
    job: str
    run: str

    def write(self, folder: Path) -> None:
        """Writes the record into the plan's folder."""
        write_text(folder / FILE, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Returns the record in `folder`, or None if nothing was submitted from it."""
        file = folder / FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
