"""`terakoya tokenizer extend`: adds new words of a corpus to a trained tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import reading
from terakoya.preparation.options import Documents, PrepareOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tokenizer extend`."""

    folder: Annotated[Path, typer.Argument(help="The tokenizer's or model's folder.", metavar="FOLDER")]
    corpus: Annotated[list[str], typer.Option(help="The text, as for `terakoya prepare`; may be repeated.")]
    out: Annotated[Path, typer.Option(help="The new tokenizer's folder.", show_default=False)]
    add: Annotated[int, typer.Option(min=1, help="How many pieces to add at most.")] = 1000
    min_frequency: Annotated[int, typer.Option(min=1, help="How often a new piece occurs at least.")] = 2
    processes: Annotated[int | None, PrepareOptions] = None
    documents: Annotated[Documents, PrepareOptions] = "blank"
    field: Annotated[str, PrepareOptions] = "text"
    encoding: Annotated[str | None, PrepareOptions] = None
    max_rejects: Annotated[int | float, PrepareOptions] = 0.01


def command(options: Options) -> None:
    """Add the new words of a text that save the most tokens to a tokenizer. Old ids stay.

    A model gets the new rows with `start_from.vocabulary`: "extend".
    """
    from terakoya.log import console, progress_bar, translated
    from terakoya_growth.extend import extend_tokenizer

    with progress_bar("tokenizer") as progress:
        facts = extend_tokenizer(
            options.folder, options.out, options.corpus, add=options.add, min_frequency=options.min_frequency,
            processes=options.processes, progress=progress, **reading(options),
        )  # fmt: skip
    shown = {name: facts[name] for name in ("pieces", "new_pieces", "tokens_before", "tokens_after")}
    text = ", ".join(f"{translated(name.replace('_', ' '))} {value:,}" for name, value in shown.items())
    console().print(f"{options.out}: {text}", soft_wrap=True, markup=False)
    next_command.after_tokenizer(options.out, options.corpus, next_command.reading_words(options))
