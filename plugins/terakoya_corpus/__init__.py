"""What this family adds: `corpus report` and `tokenizer count`, which read a corpus before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, Group, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_corpus.commands import count, report

    example = "terakoya corpus report corpus/*.jsonl.gz --clean clean.json --out report.html"
    counting = "terakoya tokenizer count corpus.jsonl.gz --type mecab_wordpiece --out work/words.counts"
    return {
        "corpus": Group("See what is in a corpus before anything is trained.", after="tokenizer"),
        "corpus report": Command(report.command, example),
        "tokenizer count": Command(count.command, counting, after="tokenizer import"),
    }
