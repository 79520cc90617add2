"""`tools/bench/muon.py` compares a step of the demo's recipe with one with AdamW, on the processor with fewest
instructions that people have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "muon.py"


@pytest.mark.nightly
def test_muon_is_no_burden_without_bf16(tmp_path: Path) -> None:
    """Its products in bf16 would make a step several times as long there."""
    ran = subprocess.run(
        [sys.executable, TOOL, "--avx2", "--steps", "8", "--rounds", "1"], capture_output=True, text=True, cwd=tmp_path
    )
    found = re.search(r"a step with Muon takes ([\d.]+) x", ran.stdout)
    assert found, ran.stdout + ran.stderr
    assert float(found[1]) < 2
