"""What comes before a run: `init` chooses one, `estimate` says what it needs, `train --dry-run` tries it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components.vocabulary import Vocabulary
    from terakoya.config.parameters import Parameters
    from terakoya.distributed.context import DistributedContext


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Adds `init` and `estimate`."""
    from terakoya_planning.commands import estimate, init

    chosen = "terakoya init wiki.jsonl.gz books/ --family encoder --goal model --gpu h100 --hours 24"
    estimated = "terakoya estimate bert_ja --vocab-size 32768 --gpus 8 --device h100"
    return {
        "init": Command(init.command, chosen, after="demo"),
        "estimate": Command(estimate.command, estimated, after="store"),
    }


@hookimpl
def register_options() -> Mapping[str, Callable[..., None]]:
    """Adds `--dry-run` to `train`."""
    from terakoya_planning.commands import dry_run

    return {"train": dry_run.train}


@hookimpl
def register_watches() -> Mapping[str, Callable[..., Any]]:
    """Adds advice where memory runs out."""
    return {"memory": _explain}


def _explain(
    parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> AbstractContextManager[None]:
    from terakoya_planning.out_of_memory import explain_allocation_errors

    return explain_allocation_errors(parameters, vocabulary, context)
