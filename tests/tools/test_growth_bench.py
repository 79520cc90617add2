"""`tools/bench/growth.py` measures how soon a grown model is as good as one from scratch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from terakoya_contract import toy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_way_trains_and_is_measured(tmp_path: Path, forks: None) -> None:
    store = toy.make_store(tmp_path).folder
    sizes = {"hidden-size": 32, "layers": 2, "small-layers": 1, "small-steps": 2, "grown-steps": 4, "every": 2}
    arguments = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, ROOT / "tools/bench/growth.py", store, store, "--seeds", "1", "--steps", "2", "4"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stderr
    printed = result.stdout
    assert re.search(
        r"^seed 0 from scratch: 2 steps \d\.\d{3}, 4 steps \d\.\d{3}; the small one took \d+%", printed, re.M
    )
    for way in ("stack", "identity"):
        assert re.search(
            rf"^seed 0 {way}: begins at \d\.\d{{3}}; 2 steps (\d+|inf)%, 4 steps (\d+|inf)%$", printed, re.M
        )
        assert re.search(rf"^{way}: 2 steps", printed, re.M)
    small = re.search(r"small model ends at (\S+)", printed)
    begins = re.search(r"seed 0 identity: begins at (\d\.\d{3})", printed)
    assert small is not None and begins is not None and small[1] == begins[1]
