"""Large corpora and published tokenizers that are not part of the project.

`TERAKOYA_TEST_DATA` names their folder. Every promise is tested without them; tests that use them are marked
`real_data`, and are skipped where a file is missing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("TERAKOYA_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def real_data(name: str) -> Path:
    """The file or folder `name`; skips the test where it is missing."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"needs {name} in the folder that TERAKOYA_TEST_DATA names")
    return path
