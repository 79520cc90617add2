"""What this family adds: `terakoya evaluate`, what a model or a run has learned, in numbers."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_evaluation.commands import evaluate

    example = "terakoya evaluate work/model --corpus held_out.jsonl.gz"
    return {"evaluate": Command(evaluate.command, example, after="verify")}
