"""Reads exports of every architecture and kind of tokenizer with older versions of Transformers, and compares.

python tools/older_transformers/table.py FOLDER VERSION...      (for example: work/table 4.57.6 4.45.2)

For each version it makes the environment FOLDER/VERSION with pip, which borrows torch from the environment that runs
this. Ends with 1 if an export is read otherwise than it was written.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from environments import make_environment  # noqa: E402

FURTHER = ("sentencepiece", "fugashi", "unidic-lite")


def main(folder: Path, versions: list[str]) -> int:
    """Returns 1 if one of `versions`, or the Transformers of this environment, reads an export otherwise, else 0."""
    exports = folder / "exports"
    if not exports.exists():
        subprocess.run([sys.executable, HERE / "write.py", exports], check=True)
    pythons = [sys.executable, *(str(make_transformers(folder / version, version)) for version in versions)]
    return max(subprocess.run([python, HERE / "read.py", exports], check=False).returncode for python in pythons)


def make_transformers(folder: Path, version: str) -> Path:
    """Returns the Python of the environment `folder` with Transformers `version`, which it makes first."""
    return make_environment(folder, [f"transformers=={version}", *FURTHER])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
