"""What a run that `terakoya fork` made knows of its parent: RUN/fork.json, written once and never changed."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from terakoya.atomic_files import dump_hashed_json, load_hashed_json
from terakoya.errors import UserError

FILE = "fork.json"


class Fork(BaseModel):
    """The checkpoint at which a run has left another one.

    Attributes:
        run: the folder of the parent at that time, absolute.
        step: the step of the checkpoint.
        manifest: the SHA-256 of the checkpoint's `manifest.json`, which names the hashes of all its files.
        changed: the keys of parameters that the user has changed at this step, and a resume would refuse to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    step: NonNegativeInt
    manifest: str
    changed: tuple[str, ...]

    def describe(self) -> str:
        """Returns where the run has left its parent."""
        return f"{self.run} at step {self.step:,}"


def write_fork(folder: Path, fork: Fork) -> None:
    """Writes `fork` into the new folder of a run."""
    (folder / FILE).write_bytes(dump_hashed_json(fork.model_dump(mode="json")))


def read_fork(folder: Path) -> Fork | None:
    """Returns what the run in `folder` knows of its parent; None if it has none. Raises UserError if the file is not
    the one that was written."""
    file = folder / FILE
    try:
        return Fork.model_validate_json(json.dumps(load_hashed_json(file.read_bytes())))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(
            f"{file}: damaged: {' '.join(str(error).split())[:200]}; restore it from a copy, or fork the run again"
        ) from error
