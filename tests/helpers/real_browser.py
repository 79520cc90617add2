"""The headless browser of tools/browser.py, for tests of pages; where there is none, they are skipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(name: str) -> Any:
    """Returns the module `name` of tools/."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


needs_browser = pytest.mark.skipif(
    load_tool("browser").find_browser() is None, reason="there is no browser here: apt-get install chromium"
)
