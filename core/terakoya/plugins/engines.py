"""The names of engines, and which runs take an engine of a plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terakoya.plugins.families import FAMILIES
from terakoya.plugins.loading import registry

OWN = "ddp"
"""The engine of the core, in which each process has rows of its own."""
GIVEN_WHOLE = ("deepspeed",)
"""Engines of plugins that take a whole module and divide it themselves; they do so for a run of one process, too."""
SIZES = ("tp_size", "pp_size", "sp_size", "cp_size")
"""The keys with which several processes work on the same rows."""


def engine_names() -> list[str]:
    """Returns the names for `parallel.engine`, sorted: that of the core, those of plugins, and those of families that
    are not there, which a run names to the user."""
    return sorted({OWN, *registry().engines, *(name for family in FAMILIES.values() for name in family.engines)})


def plugin_engine(parallel: Mapping[str, Any], *, processes: int = 2) -> str | None:
    """Returns the name of the plugin's engine that a run of so many `processes` with the settings `parallel` takes;
    None where the core has it. As "ddp" a plugin has the engine of processes that work on the same rows."""
    engine: str = parallel.get("engine", OWN)
    if processes == 1 and engine not in GIVEN_WHOLE:
        return None
    return None if engine == OWN and all(parallel.get(size, 1) == 1 for size in SIZES) else engine
