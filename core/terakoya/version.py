"""The version of terakoya."""

from __future__ import annotations

import subprocess
from pathlib import Path

__version__ = "0.1.0"


def find_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Returns the git commit of this code, with `-dirty` behind it where tracked files differ from it; None where it
    was installed as a package, or git is not there."""
    git = ["git", "-C", str(folder)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "version.py"], check=True, capture_output=True, timeout=10)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
