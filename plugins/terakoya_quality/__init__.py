"""What a finished model is worth: measured as it is, and fine-tuned for tasks. README.md says what is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import EventPlugin


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Adds `finetune`."""
    from terakoya_quality.commands import finetune

    return {
        "finetune": Command(
            finetune.command,
            "terakoya finetune work/model --train train.jsonl --eval eval.jsonl --task classification "
            "--out work/classifier",
            after="try",
        ),
    }


@hookimpl
def register_options() -> Mapping[str, Callable[..., None]]:
    """Adds `--tasks` to `evaluate`."""
    from terakoya_quality.commands import tasks

    return {"evaluate": tasks.evaluate}


@hookimpl
def register_events() -> Mapping[str, type[EventPlugin]]:
    """Adds `task_scores`."""
    from terakoya_quality.task_scores import TaskScores

    return {"task_scores": TaskScores}
