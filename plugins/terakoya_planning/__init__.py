"""What comes before a run: `init` chooses one, `estimate` says what it needs, `train --dry-run` tries it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from terakoya import Command, hookimpl


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
