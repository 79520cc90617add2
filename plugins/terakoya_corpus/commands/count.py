"""`terakoya tokenizer count`: counts the words of a corpus once, for all tokenizers that are trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import reading
from terakoya.preparation.options import Documents, PrepareOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tokenizer count`."""

    corpus: Annotated[list[str], typer.Argument(help="Files, folders and addresses, as for `train`.")]
    out: Annotated[Path, typer.Option(help="The new file for the table.")]
    type: Annotated[str, typer.Option(help="A kind of tokenizer that learns from words.")]
    processes: Annotated[int | None, PrepareOptions] = None
    documents: Annotated[Documents, PrepareOptions] = "blank"
    field: Annotated[str, PrepareOptions] = "text"
    encoding: Annotated[str | None, PrepareOptions] = None
    max_rejects: Annotated[int | float, PrepareOptions] = 0.01
    clean: Annotated[Path | None, PrepareOptions] = None
    clean_folder: Annotated[Path | None, PrepareOptions] = None
    set_: Annotated[
        Sequence[str], typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the kind; may be repeated.")
    ] = ()


def command(options: Options) -> None:
    """Count words once. `tokenizer train --set counts=TABLE` then skips counting, for kinds that split words alike."""
    from terakoya.json_settings import apply_overrides
    from terakoya.log import console, progress_bar
    from terakoya.plugins.cleaning import plan_folder
    from terakoya_corpus.count_words import save_word_counts

    with progress_bar("count") as progress:
        table = save_word_counts(
            options.corpus,
            options.out,
            settings={**apply_overrides({}, options.set_), "type": options.type},
            processes=options.processes,
            clean=options.clean,
            clean_folder=options.clean_folder,
            progress=progress,
            **reading(options),
        )
    console().print(
        f"{options.out}: {len(table.counts):,} distinct words of {table.words:,} in {table.documents:,} documents; "
        f"{sum(table.rejected.values()):,} documents rejected",
        soft_wrap=True,
        markup=False,
    )
    words = ("--type", options.type, "--set", f"counts={options.out}", "--out", options.out.with_name("tokenizer"))
    plan = options.clean_folder or plan_folder(options.out)
    next_command.show("tokenizer", "train", *options.corpus, *words, *next_command.reading_words(options, plan))
