"""What this family adds: `terakoya try`, a finished model in use: masks filled, tokens judged, texts continued."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_inference.commands import try_model

    return {"try": Command(try_model.command, 'terakoya try work/model "東京は日本の[MASK]です。"', after="import")}
