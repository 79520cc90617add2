"""tools/screenshots.py makes every picture of the documentation, at toy size; and the pictures there are small."""

from __future__ import annotations

import re
import subprocess
import sys
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
