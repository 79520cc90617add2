"""`terakoya tokenizer count`: counts the words of a corpus once, for all tokenizers that are trained on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import CleanFolderOption, CleanOption

Documents = Literal["blank", "line"]


def command(
    corpus: Annotated[list[str], typer.Argument(help="Files, folders and addresses, as for `train`.")],
    out: Annotated[Path, typer.Option(help="The new file for the table.")],
    type: Annotated[str, typer.Option(help="A kind of tokenizer that learns from words.")],
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one for each CPU.", show_default=False)] = None,
    documents: Annotated[Documents, typer.Option(help="What separates documents in txt files.")] = "blank",
    field: Annotated[
        str,
        typer.Option(
            "--field", "--text-key", help="The key or column that holds the text; text,body: the first that is there."
        ),
    ] = "text",
    clean: CleanOption = None,
    clean_folder: CleanFolderOption = None,
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
            documents=documents,
            field=field,
            clean=clean,
            clean_folder=clean_folder,
            progress=progress,
        )
    console().print(
        f"{out}: {len(table.counts):,} distinct words of {table.words:,} in {table.documents:,} documents; "
        f"{sum(table.rejected.values()):,} documents rejected",
        soft_wrap=True,
        markup=False,
    )
    words = ("--type", type, "--set", f"counts={out}", "--out", out.with_name("tokenizer"))
    next_command.show("tokenizer", "train", *corpus, *words)
