"""What this family adds: `terakoya upload`, which pushes a model with its card to the Hub and loads it back."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, Group, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    from terakoya_hub.commands import upload

    example = "terakoya upload work/model --name my-lab/my-bert --license apache-2.0"
    return {"upload": Command(upload.command, example, after="finetune")}
