"""`terakoya tokenizer extend`: adds new words of a corpus to a trained tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands import shared_options as shared
from terakoya.commands.guidance import next_command


def command(
    folder: Annotated[Path, typer.Argument(help="The tokenizer's or model's folder.", metavar="FOLDER")],
    corpus: Annotated[list[str], typer.Option(help="The text, as for `terakoya prepare`; may be repeated.")],
    out: Annotated[Path, typer.Option(help="The new tokenizer's folder.", show_default=False)],
    add: Annotated[int, typer.Option(min=1, help="How many pieces to add at most.")] = 1000,
    min_frequency: Annotated[int, typer.Option(min=1, help="How often a new piece occurs at least.")] = 2,
    processes: shared.ProcessesOption = None,
    documents: shared.DocumentsOption = "blank",
    field: shared.FieldOption = "text",
    encoding: shared.EncodingOption = None,
    max_rejects: shared.MaxRejectsOption = "0.01",
) -> None:
    """Add the new words of a text that save the most tokens to a tokenizer. Old ids stay.

    A model gets the new rows with `start_from.vocabulary`: "extend".
    """
    from terakoya.log import console, progress_bar, translated
    from terakoya.tokenization.extend import extend_tokenizer

    reading = shared.reading(documents, field, encoding, max_rejects)
    with progress_bar("tokenizer") as progress:
        facts = extend_tokenizer(
            folder,
            out,
            corpus,
            add=add,
            min_frequency=min_frequency,
            processes=processes,
            progress=progress,
            **reading,
        )
    shown = {name: facts[name] for name in ("pieces", "new_pieces", "tokens_before", "tokens_after")}
    text = ", ".join(f"{translated(name.replace('_', ' '))} {value:,}" for name, value in shown.items())
    console().print(f"{out}: {text}", soft_wrap=True, markup=False)
    next_command.after_tokenizer(out, corpus, reading)
