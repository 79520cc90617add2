"""The headless browser of tools/browser.py, for tests of pages; where there is none, they are skipped."""

from __future__ import annotations

import pytest
from tool_modules import load_tool

needs_browser = pytest.mark.skipif(
    load_tool("browser").find_browser() is None, reason="there is no browser here: apt-get install chromium"
)
