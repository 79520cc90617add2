"""What a finished model is worth: measured as it is, and fine-tuned for tasks. README.md says what is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import EventPlugin


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Adds `evaluate` and `finetune`."""
    from terakoya_quality.commands import evaluate, finetune

    return {
        "evaluate": Command(
            evaluate.command, "terakoya evaluate work/model --corpus held_out.jsonl.gz", after="verify"
        ),
        "finetune": Command(
            finetune.command,
            "terakoya finetune work/model --train train.jsonl --eval eval.jsonl --task classification "
            "--out work/classifier",
            after="try",
        ),
    }


@hookimpl
def register_events() -> Mapping[str, type[EventPlugin]]:
    """Adds `task_scores`."""
    from terakoya_quality.task_scores import TaskScores

    return {"task_scores": TaskScores}
