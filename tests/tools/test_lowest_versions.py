"""The lowest versions that continuous integration installs are those of pyproject.toml."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "lowest_versions.py"


def test_each_dependency_has_a_lower_bound_and_is_printed_with_it() -> None:
    printed = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=True).stdout.split()
    pins = dict(pin.split("==") for pin in printed)
    assert pins["transformers"] == "5.17" and pins["sentencepiece"] == "0.2.3"
    assert "torch" not in pins
    project = (TOOL.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = project.partition("\ndependencies = [\n")[2].partition("\n]")[0].splitlines()
    assert len(pins) == len(dependencies) - 1
