"""What this family adds: rows of a store as text, stores made of stores. README.md says what is here."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_stores.commands import merge, sample

    merging = "terakoya store merge work/wiki work/books --out work/store"
    splitting = "terakoya store split work/store --parts 98,2 --out work/train --out work/val"
    return {
        "store sample": Command(sample.command, "terakoya store sample work/store --masks", after="store count"),
        "store merge": Command(merge.merge_command, merging, after="store sample"),
        "store split": Command(merge.split_command, splitting, after="store merge"),
    }
