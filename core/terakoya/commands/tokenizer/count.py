"""`terakoya tokenizer count`: counts the words of a corpus once, for all tokenizers that are trained on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands import shared_options as shared
from terakoya.commands.guidance import next_command


def command(
    corpus: Annotated[list[str], typer.Argument(help="Files, folders and addresses, as for `train`.")],
    out: Annotated[Path, typer.Option(help="The new file for the table.")],
    type: Annotated[str, typer.Option(help="A kind of tokenizer that learns from words.")],
    processes: shared.ProcessesOption = None,
    documents: shared.DocumentsOption = "blank",
    field: shared.FieldOption = "text",
    encoding: shared.EncodingOption = None,
    max_rejects: shared.MaxRejectsOption = "0.01",
    clean: shared.CleanOption = None,
    clean_folder: shared.CleanFolderOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the kind; may be repeated.")
    ] = None,
) -> None:
    """Count words once. `tokenizer train --set counts=TABLE` then skips counting, for kinds that split words alike."""
    from terakoya.json_settings import apply_overrides
    from terakoya.log import console, progress_bar
    from terakoya.tokenization.count_words import save_word_counts

    with progress_bar("count") as progress:
        table = save_word_counts(
            corpus,
            out,
            settings={**apply_overrides({}, set_ or ()), "type": type},
            processes=processes,
            clean=clean,
            clean_folder=clean_folder,
            progress=progress,
            **shared.reading(documents, field, encoding, max_rejects),
        )
    console().print(
        f"{out}: {len(table.counts):,} distinct words of {table.words:,} in {table.documents:,} documents; "
        f"{sum(table.rejected.values()):,} documents rejected",
        soft_wrap=True,
        markup=False,
    )
    words = ("--type", type, "--set", f"counts={out}", "--out", out.with_name("tokenizer"))
    next_command.show("tokenizer", "train", *corpus, *words)
