"""`terakoya store sample` prints rows of a store as text, with the borders of tokens and words, with masks, or with the
labels of causal models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError

if TYPE_CHECKING:
    from rich.text import Text

    from terakoya.store.token_store import TokenStore
    from terakoya_stores.sample import SampledToken

_MASKED, _CAUSAL, _ANSWERS = "masked_lm", "causal_lm", "instruction"
_BACKGROUNDS = (("black on bright_cyan", "black on cyan"), ("black on bright_yellow", "black on yellow"))
"""Background colours: words alternate between two colours, tokens of a word between two shades."""
_MARKINGS = {
    "masked": "bold white on red",
    "replaced": "bold white on magenta",
    "kept": "bold white on blue",
    "ignored": "white on bright_black",
    "answer": "bold white on green",
}
_BEGIN = "‖"
"""Mark before the first token of a document in causal rows."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `store sample`."""

    store: Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")]
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 3
    start: Annotated[int, typer.Option(min=0, help="First sequence to show.")] = 0
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to show of each sequence.")] = 200
    masks: Annotated[bool, typer.Option("--masks", help="Show the first training rows, and what masked_lm masks.")] = (
        False
    )
    causal: Annotated[
        bool,
        typer.Option("--causal", help="Show the first training rows, and what causal_lm (or instruction) predicts."),
    ] = False
    set_: Annotated[
        Sequence[str],
        typer.Option(
            "--set",
            help="With --masks and --causal: a setting of the objective, such as layout=stream.",
            metavar="KEY=VALUE",
        ),
    ] = ()
    sequence_length: Annotated[int, typer.Option(min=8, help="With --masks and --causal: tokens per row.")] = 128
    seed: Annotated[int, typer.Option(min=0, help="With --masks and --causal: the run's seed.")] = 42


def sample(store: TokenStore, options: Options) -> list[list[SampledToken]]:
    """Returns rows of `store`, decoded with the store's own tokenizer. Raises UserError for a damaged store, for one
    without a tokenizer, and for settings that the objective does not have.

    Without `masks` and `causal` these are `rows` sequences from `start` on, cut after `tokens` tokens. With `masks`
    they are the first rows of `sequence_length` tokens of the running text, masked as in the first epoch of a run with
    `seed`: whole words if the store has word starts. With `causal` they are the first rows that `causal_lm` learns
    from, or `instruction` for a store of conversations.
    """
    from terakoya.commands.component_settings import gather
    from terakoya.plugins.create import create_component
    from terakoya.tokenization.recognise import load_decoder
    from terakoya_stores.sample import sample as sample_rows
    from terakoya_stores.sample import sample_causal, sample_masked

    if options.masks and options.causal:
        raise UserError("--masks and --causal: expected one of them: rows of an encoder, or of a causal model")
    settings = gather({}, options.set_, {})
    if settings and not (options.masks or options.causal):
        raise UserError("--set: these are settings of the objective: give --masks or --causal too")
    tokenizer = load_decoder(store.tokenizer_folder)
    if not (options.masks or options.causal):
        return sample_rows(store, tokenizer, rows=options.rows, start=options.start, most_tokens=options.tokens)
    if options.masks:
        settings = {"layout": "stream", "whole_word_mask": store.facts.word_starts, **settings}
    name = _MASKED if options.masks else _ANSWERS if store.facts.learned else _CAUSAL
    first_rows = sample_masked if options.masks else sample_causal
    return first_rows(
        store, tokenizer, create_component("objectives", name, settings, where="--set"), rows=options.rows,
        sequence_length=options.sequence_length, seed=options.seed,
    )  # fmt: skip


def format_plain(row: Sequence[SampledToken]) -> str:
    """Formats a row for a pipe: `|` at the start of a word, `/` at a token inside a word, and `[text→input]` for a
    token to predict, with the input that replaces it. In causal rows `‖` at the start of a document, `text→label` if
    the label is not the next token, and `(text)` if there is no label. In conversations `⟪` and `⟫` around answers."""
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
        text = _escape_line_ends(token.text)
        if token.marking == "ignored":
            text = f"({text})"
        elif token.marking not in ("none", "answer"):
            text = f"[{text}→{token.shown if token.shown != token.text else '='}]"
        parts.append(f"{text}→{_escape_line_ends(token.label)}" if token.label else text)
    return "".join(parts) + "⟫" * (before == "answer")


def format_coloured(row: Sequence[SampledToken]) -> Text:
    """Formats a row for a terminal."""
    from rich.text import Text

    line, word, shade = Text(), 0, 0
    for token in row:
        if token.starts_word is False:
            shade = 1 - shade
        else:
            word, shade = 1 - word, 0
        style = _MARKINGS.get(token.marking, _BACKGROUNDS[word][shade])
        if token.begins_document:
            line.append(_BEGIN, "bold")
        line.append(_escape_line_ends(token.text), style)
        if token.marking == "replaced":
            line.append(f"→{token.shown}", f"dim {style}")
        if token.label:
            line.append(f"→{_escape_line_ends(token.label)}", "bold")
    return line


def _escape_line_ends(text: str) -> str:
    return text.replace("\n", "\\n")


def command(options: Options) -> None:
    """Show some text of a store, with the borders of tokens and words.

    In causal rows, ‖ begins a document, →x is the label if it is not the next token, and (x) has no label.
    In conversations, ⟪ ⟫ enclose answers; their chat template is printed first.
    """
    from rich.text import Text

    from terakoya.log import console
    from terakoya.store.token_store import open_store

    opened = open_store(options.store)
    shown = sample(opened, options)
    out = console()
    template = opened.tokenizer_folder / "chat_template.jinja"
    if opened.facts.learned and template.is_file():
        out.print(Text(f"{template}:\n{template.read_text(encoding='utf-8').rstrip()}\n", "dim"), soft_wrap=True)
    for row in shown:
        if out.is_terminal:
            out.print(format_coloured(row))
            out.print()
        else:
            out.print(Text(format_plain(row)), soft_wrap=True)
    seen = {token.marking for row in shown for token in row}
    if out.is_terminal and (seen & _MARKINGS.keys()):
        out.print(*(Text(f" {marking} ", style) for marking, style in _MARKINGS.items() if marking in seen))
    next_command.after_store(options.store, opened.facts)
