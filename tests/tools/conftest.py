"""What the tests of the tools share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module", autouse=True)
def forgotten_tools() -> Iterator[None]:
    """Forgets the tools' modules that the tests of a file imported: two folders of tools may have modules of one name.
    What the file itself imports, at its top, stays."""
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and TOOLS in Path(file).parents:
            del sys.modules[name]
