"""What this family adds: `terakoya run`, one JSON from raw text to a published model, and `terakoya demo`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_pipeline.commands import demo, run

    return {
        "demo": Command(demo.command, "terakoya demo --out work/demo", after=""),
        "run": Command(run.command, "terakoya run pipeline.json", after="init"),
    }


@hookimpl
def register_settings() -> Mapping[str, type[BaseModel]]:
    """Implements `terakoya.hookspecs.register_settings`."""
    from terakoya_pipeline.settings import Pipeline

    return {"run": Pipeline}
