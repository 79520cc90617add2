"""tools/screenshots.py makes every picture of the documentation, at toy size; and the pictures there are small."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_browser import needs_browser

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "screenshots.py"
FIGURES = ROOT / "docs" / "figures"


def test_every_picture_of_the_documentation_is_small_and_shown() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    made = set(re.findall(r'out / "(\w+\.png)"', SCRIPT.read_text(encoding="utf-8")))
    assert made == {picture.name for picture in FIGURES.glob("*.png")}
    for name in made:
        assert (FIGURES / name).stat().st_size < 150_000 and f"figures/{name})" in pages, name


def test_without_a_browser_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "there is no browser here" in done.stdout, done.stderr


KILLED = """
import sys
from pathlib import Path
import screenshots
sys.executable = sys.argv[1]
screenshots.{call}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems send no signal")
@pytest.mark.parametrize("call", [
    "run_command(Path('.'), 'demo')",
    "serving(Path('.')).__enter__()",
    "train_in_a_terminal(Path('.'), None, Path('live.png'), steps=8)",
])  # fmt: skip
def test_what_it_started_ends_when_it_is_killed(call: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho $$ > started.new; mv started.new started; exec sleep 600\n")
    program.chmod(0o755)
    command = [sys.executable, "-c", KILLED.format(call=call), str(program)]
    path = os.pathsep.join([str(ROOT / "tools"), *filter(None, sys.path)])
    script = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    end = time.monotonic() + 60
    while not (tmp_path / "started").is_file() and script.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    script.kill()
    script.wait()
    child = Path("/proc") / (tmp_path / "started").read_text().strip()
    end = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    alive = is_alive(child)
    if alive:
        os.kill(int(child.name), signal.SIGKILL)
    assert not alive, "it runs on"


def is_alive(process: Path) -> bool:
    """Returns whether a process, by its folder in /proc, is there and no zombie."""
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.nightly
@needs_browser
def test_it_makes_every_picture_at_toy_size(tmp_path: Path) -> None:
    pytest.importorskip("markdown")
    pytest.importorskip("PIL")
    command = [sys.executable, str(SCRIPT), "--toy", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {
        "train.png", "live.png", "report.png", "tokenizer_report.png", "card.png"
    }  # fmt: skip
