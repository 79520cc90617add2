"""What the tests of the tools share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module", autouse=True)
def forgotten_tools() -> Iterator[None]:
    """Forgets the tools' modules after each file of tests: two folders of tools may have modules of one name."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and TOOLS in Path(file).parents:
            del sys.modules[name]
