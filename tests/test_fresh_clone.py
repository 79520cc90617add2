"""What a newcomer does first: clone, `make demo`, once more, and from there `make check`."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_make_demo_twice_and_make_check_on_a_fresh_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository to clone: this is an unpacked distribution")
    clone = tmp_path / "terakoya"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "OMP_NUM_THREADS")}

    def make(target: str) -> str:
        done = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    first = make("demo")
    accuracy = re.search(r"masked words predicted correctly [0-9.]+% -> ([0-9.]+)%", first)
    assert accuracy is not None and float(accuracy[1]) >= 25.0  # what the model knows of documents it has not seen
    start = time.monotonic()
    second = make("demo")
    assert "made earlier" in second
    assert "-m pip" not in second
    assert time.monotonic() - start < 60
    make("check")
