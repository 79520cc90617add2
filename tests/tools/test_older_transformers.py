"""Exports are read by older versions of Transformers as they were written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "older_transformers" / "table.py"


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_older_versions_of_transformers_read_every_export(tmp_path: Path) -> None:
    """Makes environments with pip; docs/exports.md names the same versions."""
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path), "5.17.0", "4.57.6", "4.45.2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    totals = [line for line in done.stdout.splitlines() if line.startswith("transformers ")]
    assert len(totals) == 4
    assert all(line.endswith(" of models or scaled positions that it does not have, 0 not") for line in totals)
