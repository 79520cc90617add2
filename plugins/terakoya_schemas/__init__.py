"""What this family adds: `terakoya parameters schema`, with which an editor completes and explains keys."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_schemas.commands import schema

    example = "terakoya parameters schema > schema.json"
    return {"parameters schema": Command(schema.command, example, after="parameters show")}
