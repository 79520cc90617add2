"""`terakoya prepare` encodes raw text into a token store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.commands.guidance import next_command
from terakoya.log import console, plural, progress_bar
from terakoya.preparation.options import PrepareOptions

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts


def command(options: PrepareOptions) -> None:
    """Encode text into a token store. After an interruption, the same command finishes the rest."""
    announce(options)

    from terakoya.preparation.prepare import prepare_store

    with progress_bar("prepare") as progress:
        facts = prepare_store(options, progress=progress)
    show(options, facts)


def announce(options: PrepareOptions) -> None:
    """Says that the corpus is looked at."""
    from terakoya.log import announce

    announce(f"terakoya prepare: looks at the corpus for {options.out} ...")


def show(options: PrepareOptions, facts: StoreFacts) -> None:
    """Prints what the finished store holds, and the next command."""
    console().print(_describe(options.out, facts), soft_wrap=True, markup=False)
    if options.shard is None:
        next_command.after_store(options.out, facts)


def _describe(out: Path, facts: StoreFacts) -> str:
    return (
        f"{out}: {facts.documents:,} document{plural(facts.documents)}, "
        f"{facts.sequences:,} sequence{plural(facts.sequences)}, {facts.tokens:,} tokens; "
        f"{facts.rejected:,} document{plural(facts.rejected)} rejected"
    )
