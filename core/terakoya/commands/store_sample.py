"""`terakoya store sample`: a store's rows as text, with the borders of tokens and words and with masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from terakoya.data.store_sample import ShownToken

_OBJECTIVE = "masked_lm"
_GROUNDS = (("black on bright_cyan", "black on cyan"), ("black on bright_yellow", "black on yellow"))
"""Words take turns between two colours, tokens of a word between two shades."""
_FATES = {"masked": "bold white on red", "replaced": "bold white on magenta", "kept": "bold white on blue"}


def sample(
    folder: Path,
    *,
    rows: int = 3,
    start: int = 0,
    tokens: int = 200,
    masks: bool = False,
    sequence_length: int = 128,
    seed: int = 42,
) -> list[list[ShownToken]]:
    """Rows of the store in `folder`, decoded with the store's own tokenizer.

    Without `masks` these are `rows` sequences from `start` on, cut at `tokens` tokens; with them the first rows of
    `sequence_length` of the text as it stands, masked as in the first epoch of a run with `seed`: whole words where the
    store knows them.

    Raises UserError for a damaged store, and for one without a tokenizer.
    """
    from terakoya import plugins
    from terakoya.commands.prepare import recognise_tokenizer
    from terakoya.data.store import TokenStore
    from terakoya.data.store_sample import sample as sample_rows
    from terakoya.data.store_sample import sample_masked

    store = TokenStore.open(folder)
    tokenizer = recognise_tokenizer(store.tokenizer_folder).load(store.tokenizer_folder)
    if not masks:
        return sample_rows(store, tokenizer, rows=rows, start=start, most_tokens=tokens)
    settings = {"layout": "stream", "whole_word_mask": store.facts.word_starts}
    objective = plugins.registry().component("objectives", _OBJECTIVE).model_validate(settings)
    return sample_masked(store, tokenizer, objective, rows=rows, sequence_length=sequence_length, seed=seed)


def plain(row: Sequence[ShownToken]) -> str:
    """A row for a pipe: `|` where a word begins, `/` where a token inside a word does, `[text→what is shown]` where
    the token is to be predicted."""
    parts = []
    for number, token in enumerate(row):
        if number:
            parts.append("/" if token.starts_word is False else "|")
        text = token.text.replace("\n", "\\n")
        parts.append(
            text if token.fate == "as it is" else f"[{text}→{token.shown if token.shown != token.text else '='}]"
        )
    return "".join(parts)


def coloured(row: Sequence[ShownToken]) -> Text:
    """A row for a terminal."""
    from rich.text import Text

    line, word, shade = Text(), 0, 0
    for token in row:
        if token.starts_word is False:
            shade = 1 - shade
        else:
            word, shade = 1 - word, 0
        style = _FATES.get(token.fate, _GROUNDS[word][shade])
        line.append(token.text.replace("\n", "\\n"), style)
        if token.fate == "replaced":
            line.append(f"→{token.shown}", f"dim {style}")
    return line


def command(
    store: Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")],
    rows: Annotated[int, typer.Option(min=1, help="How many rows.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="The first sequence shown.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence shown.")] = 200,
    masks: Annotated[
        bool, typer.Option("--masks", help="Show the first training rows, and what masked_lm masks.")
    ] = False,
    sequence_length: Annotated[int, typer.Option(min=8, help="Of --masks: tokens of a row.")] = 128,
    seed: Annotated[int, typer.Option(help="Of --masks: the run's seed.")] = 42,
) -> None:
    """Show some text of a store, with the borders of tokens and words."""
    from rich.text import Text

    from terakoya.log import console

    shown = sample(
        store, rows=rows, start=start, tokens=tokens, masks=masks, sequence_length=sequence_length, seed=seed
    )
    out = console()
    for row in shown:
        if out.is_terminal:
            out.print(coloured(row))
            out.print()
        else:
            out.print(Text(plain(row)), soft_wrap=True)
    if masks and out.is_terminal:
        out.print(*(Text(f" {fate} ", style) for fate, style in _FATES.items()))
