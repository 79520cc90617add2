"""`terakoya store sample`: a store's rows as text, with the borders of tokens and words, with masks, or as causal
models see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from rich.text import Text

    from terakoya.components import Objective
    from terakoya.rows.sample import SampledToken

_MASKED, _CAUSAL, _ANSWERS = "masked_lm", "causal_lm", "instruction"
_GROUNDS = (("black on bright_cyan", "black on cyan"), ("black on bright_yellow", "black on yellow"))
"""Words take turns between two colours, tokens of a word between two shades."""
_MARKINGS = {
    "masked": "bold white on red",
    "replaced": "bold white on magenta",
    "kept": "bold white on blue",
    "ignored": "white on bright_black",
    "answer": "bold white on green",
}
_BEGIN = "‖"
"""Stands before the first token of a document in causal rows."""


def sample(
    folder: Path,
    *,
    rows: int = 3,
    start: int = 0,
    tokens: int = 200,
    masks: bool = False,
    causal: bool = False,
    settings: Mapping[str, Any] | None = None,
    sequence_length: int = 128,
    seed: int = 42,
) -> list[list[SampledToken]]:
    """Rows of the store in `folder`, decoded with the store's own tokenizer.

    Without `masks` and `causal` these are `rows` sequences from `start` on, cut at `tokens` tokens. With `masks` they
    are the first rows of `sequence_length` of the text as it stands, masked as in the first epoch of a run with `seed`:
    whole words where the store knows them. With `causal` they are the first rows that `causal_lm` learns from, or of a
    store of conversations `instruction`. `settings` are the objective's.

    Raises UserError for a damaged store, one without a tokenizer, and settings that the objective does not take.
    """
    from terakoya.rows.sample import sample as sample_rows
    from terakoya.rows.sample import sample_causal, sample_masked
    from terakoya.store.token_store import TokenStore
    from terakoya.tokenization.recognise import recognise_tokenizer

    if masks and causal:
        raise UserError("--masks and --causal: expected one of them: rows of an encoder, or of a causal model")
    if settings and not (masks or causal):
        raise UserError("--set: settings are the objective's: give --masks or --causal too")
    store = TokenStore.open(folder)
    tokenizer = recognise_tokenizer(store.tokenizer_folder).load(store.tokenizer_folder)
    if causal:
        objective = _objective(_ANSWERS if store.facts.answers else _CAUSAL, settings or {})
        return sample_causal(store, tokenizer, objective, rows=rows, sequence_length=sequence_length, seed=seed)
    if masks:
        defaults = {"layout": "stream", "whole_word_mask": store.facts.word_starts}
        objective = _objective(_MASKED, {**defaults, **(settings or {})})
        return sample_masked(store, tokenizer, objective, rows=rows, sequence_length=sequence_length, seed=seed)
    return sample_rows(store, tokenizer, rows=rows, start=start, most_tokens=tokens)


def _objective(name: str, settings: Mapping[str, Any]) -> Objective:
    """The objective `name` with `settings`. UserError where it does not take them."""
    from pydantic import ValidationError

    from terakoya import plugins
    from terakoya.json_settings import explain

    kind = plugins.registry().component("objectives", name)
    try:
        objective: Objective = kind.model_validate(settings)
    except ValidationError as error:
        raise UserError("\n".join(f"--set: {line}" for line in explain(error, kind))) from None
    return objective


def plain(row: Sequence[SampledToken]) -> str:
    """A row for a pipe: `|` where a word begins, `/` where a token inside a word does, `[text→what is shown]` where
    the token is to be predicted. Of causal rows `‖` where a document begins, `text→label` where another token than the
    next is to be predicted, `(text)` where none is. Of conversations `⟪` and `⟫` around answers."""
    parts, before = [], ""
    for number, token in enumerate(row):
        if before == "answer" != token.marking:
            parts.append("⟫")
        if token.begins_document:
            parts.append(_BEGIN)
        elif number:
            parts.append("/" if token.starts_word is False else "|")
        if before != "answer" == token.marking:
            parts.append("⟪")
        before = token.marking
        text = _one_line(token.text)
        if token.marking == "ignored":
            text = f"({text})"
        elif token.marking not in ("none", "answer"):
            text = f"[{text}→{token.shown if token.shown != token.text else '='}]"
        parts.append(f"{text}→{_one_line(token.label)}" if token.label else text)
    return "".join(parts) + "⟫" * (before == "answer")


def coloured(row: Sequence[SampledToken]) -> Text:
    """A row for a terminal."""
    from rich.text import Text

    line, word, shade = Text(), 0, 0
    for token in row:
        if token.starts_word is False:
            shade = 1 - shade
        else:
            word, shade = 1 - word, 0
        style = _MARKINGS.get(token.marking, _GROUNDS[word][shade])
        if token.begins_document:
            line.append(_BEGIN, "bold")
        line.append(_one_line(token.text), style)
        if token.marking == "replaced":
            line.append(f"→{token.shown}", f"dim {style}")
        if token.label:
            line.append(f"→{_one_line(token.label)}", "bold")
    return line


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def command(
    store: Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")],
    rows: Annotated[int, typer.Option(min=1, help="How many rows.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="The first sequence shown.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence shown.")] = 200,
    masks: Annotated[
        bool, typer.Option("--masks", help="Show the first training rows, and what masked_lm masks.")
    ] = False,
    causal: Annotated[
        bool,
        typer.Option("--causal", help="Show the first training rows, and what causal_lm (or instruction) predicts."),
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Of --masks and --causal: a setting of the objective, such as layout=stream.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=8, help="Of --masks and --causal: tokens of a row.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of --masks and --causal: the run's seed.")] = 42,
) -> None:
    """Show some text of a store, with the borders of tokens and words.

    Of causal rows: ‖ begins a document, →x is predicted where x is not what comes next, nothing is predicted after (x).
    Of conversations: their chat template, and ⟪answers⟫.
    """
    from rich.text import Text

    from terakoya.commands.component_settings import gather
    from terakoya.log import console
    from terakoya.store.assembly import CHAT_TEMPLATE
    from terakoya.store.token_store import read_facts

    shown = sample(
        store,
        rows=rows,
        start=start,
        tokens=tokens,
        masks=masks,
        causal=causal,
        settings=gather({}, set_ or (), {}),
        sequence_length=sequence_length,
        seed=seed,
    )
    out = console()
    template = store / "tokenizer" / CHAT_TEMPLATE
    if read_facts(store).answers and template.is_file():
        out.print(Text(f"{template}:\n{template.read_text(encoding='utf-8').rstrip()}\n", "dim"), soft_wrap=True)
    for row in shown:
        if out.is_terminal:
            out.print(coloured(row))
            out.print()
        else:
            out.print(Text(plain(row)), soft_wrap=True)
    seen = {token.marking for row in shown for token in row}
    if out.is_terminal and (seen & _MARKINGS.keys()):
        out.print(*(Text(f" {marking} ", style) for marking, style in _MARKINGS.items() if marking in seen))
