"""What steps note of documents, on disk: a file for each step beside each part of an unfinished plan."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from terakoya.atomic_files import write_atomically


class ArraysOnDisk(Sequence[np.ndarray]):
    """The arrays in the files of a folder whose names have one `ending`, in their order.

    Each is opened when it is read and closed after that, because a process may not have thousands of files open.
    """

    def __init__(self, folder: Path, ending: str) -> None:
        self.files = sorted(folder.glob(f"*{ending}"))
        self.progress = folder / f"progress{ending}"
        """A file in which `CleaningStep.drop` may keep its work, so that it continues after a kill."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return np.load(self.files[index], mmap_mode="r")


def save_array(file: Path, array: np.ndarray) -> None:
    """Writes an array completely or not at all."""
    content = io.BytesIO()
    np.save(content, array)
    with write_atomically(file) as stream:
        stream.write(content.getvalue())
