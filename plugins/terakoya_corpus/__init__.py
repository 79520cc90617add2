"""What this family adds: `corpus report`, which says what is in a corpus before anything is trained. See README.md."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, Group, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_corpus.commands import report

    example = "terakoya corpus report corpus/*.jsonl.gz --clean clean.json --out report.html"
    return {
        "corpus": Group("See what is in a corpus before anything is trained.", after="tokenizer"),
        "corpus report": Command(report.command, example),
    }
