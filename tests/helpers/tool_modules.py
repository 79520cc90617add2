"""Modules of tools/, whose folders are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(path: str) -> Any:
    """Returns the module tools/`path`.py, such as `bench/mup`."""
    name = path.replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{path}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
