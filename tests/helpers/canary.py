"""A pickle that shows whether it was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Canary:
    """Reading its pickle touches a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)
