"""The note that a submitted job leaves in the folder of its plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

FILE = "submitted.json"
"""Of a plan's folder: the last job that was made of it."""


@dataclass(frozen=True)
class Note:
    """A job that was submitted: by which launcher, what its place calls it, the run's folder as it is called here."""

    launcher: str
    job: str
    run: str

    def leave(self, folder: Path) -> None:
        """Writes it into the plan's folder."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The one in `folder`, None where nothing was submitted from it."""
        file = folder / FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def plan_folder(run: Path) -> Path:
    """Where a plan for `run` is written unless somebody says otherwise."""
    return run.with_name(f"{run.name}.launch")
