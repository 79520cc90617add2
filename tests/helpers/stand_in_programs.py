"""Stand-ins for the programs of a scheduler: shell scripts that record their calls."""

from __future__ import annotations

import os
from pathlib import Path


class Programs:
    """Programs in `folder`, to be first on the PATH.

    Attributes:
        environment: the variable PATH with them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder / "programs", folder / "calls"
        self.folder.mkdir()
        self.environment = {"PATH": f"{self.folder}:{os.environ['PATH']}"}

    def set(self, **texts: str) -> None:
        """Gives programs their lines of bash."""
        for name, text in texts.items():
            program = self.folder / name
            program.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.calls_file}\n{text}\n')
            program.chmod(0o755)

    def calls(self) -> list[str]:
        """Returns the calls so far, a line each."""
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
