"""`tools/bench/longer_rows.py` measures what a model loses on longer rows, before and after it is trained on them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import toy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_way_is_measured(tmp_path: Path, forks: None) -> None:
    store = toy.make_store(tmp_path / "text", documents=60, seed=1)
    sizes = {"length": 8, "factor": 2, "tokens": 32, "steps": 2, "more-steps": 1, "hidden-size": 32, "rows": 2}
    arguments = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, ROOT / "tools/bench/longer_rows.py", store, store, "--ways", "yarn", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stderr
    for name in ("before", "yarn"):
        assert re.search(rf"^{name} +old positions \d\.\d{{3}}, new \d\.\d{{3}}: [+-]\d+\.\d%$", result.stdout, re.M)
