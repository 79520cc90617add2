"""`terakoya tokenizer`: train a tokenizer on raw text."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from terakoya.commands import tokenizer_report
from terakoya.errors import UserError

Documents = Literal["blank", "line"]

app = typer.Typer(help="Train a tokenizer on raw text.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def verbs() -> None:
    """Train a tokenizer on raw text."""


app.command("report")(tokenizer_report.command)


def train_tokenizer(
    sources: Sequence[Path],
    out: Path,
    *,
    type: str,
    settings: Mapping[str, Any] | None = None,
    processes: int | None = None,
    documents: Documents = "blank",
    field: str = "text",
    progress: Callable[[int, int], None] | None = None,
) -> Mapping[str, Any]:
    """Trains a tokenizer of kind `type` on the files `sources` into the new folder `out`; returns facts about it.

    Raises UserError for anything the user can mend; see `terakoya.tokenizer.train_tokenizer`.
    """
    from terakoya.data.corpus import Corpus
    from terakoya.tokenizer import train_tokenizer as train

    corpus = Corpus([Path(source) for source in sources], field=field, documents=documents)
    settings = {**(settings or {}), "type": type}
    return train(corpus, Path(out), settings=settings, processes=processes or _cpus(), progress=progress)


@app.command("train")
def command(
    corpus: Annotated[list[Path], typer.Argument(help="jsonl, txt, both also gzipped, or folders of them.")],
    out: Annotated[Path, typer.Option(help="The new tokenizer's folder.")],
    type: Annotated[
        str | None,
        typer.Option(help="The kind of tokenizer; see `terakoya plugins list`. Default: as in --settings."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one for each CPU.", show_default=False)] = None,
    documents: Annotated[Documents, typer.Option(help="What separates documents in txt files.")] = "blank",
    field: Annotated[str, typer.Option(help="The key of the text in jsonl files.")] = "text",
    settings: Annotated[Path | None, typer.Option(help="A JSON file with the kind's settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the kind; may be repeated.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Pieces in all.", show_default=False)] = None,
    min_frequency: Annotated[
        int | None, typer.Option(help="How often a pair must occur to become a piece.", show_default=False)
    ] = None,
    limit_alphabet: Annotated[
        int | None, typer.Option(help="Characters with a piece of their own.", show_default=False)
    ] = None,
    num_unused_tokens: Annotated[
        int | None, typer.Option(help="Empty slots for later tokens.", show_default=False)
    ] = None,
    dictionary: Annotated[
        str | None, typer.Option(help="MeCab dictionary: ipadic, unidic_lite, unidic or a folder.", show_default=False)
    ] = None,
    do_lower_case: Annotated[
        bool | None, typer.Option("--do-lower-case/--no-do-lower-case", help="Lower-case words.", show_default=False)
    ] = None,
    sample_bytes: Annotated[
        int | None, typer.Option(help="Learn from about so many bytes of text.", show_default=False)
    ] = None,
) -> None:
    """Train a tokenizer that Transformers loads. Flags win over --set, --set over --settings, that over defaults."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from terakoya.log import console, error_console
    from terakoya.parameter_files import read_json, with_overrides

    flags = {
        "vocab_size": vocab_size,
        "min_frequency": min_frequency,
        "limit_alphabet": limit_alphabet,
        "num_unused_tokens": num_unused_tokens,
        "dictionary": dictionary,
        "do_lower_case": do_lower_case,
        "sample_bytes": sample_bytes,
        "type": type,
    }
    given = with_overrides(read_json(settings) if settings is not None else {}, set_ or ())
    given.update({name: value for name, value in flags.items() if value is not None})
    kind = given.pop("type", None)
    if not isinstance(kind, str):
        raise UserError("--type: expected the kind of tokenizer, for example --type mecab_wordpiece")
    with Progress(
        TextColumn("tokenizer"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=error_console(),
        transient=True,
    ) as bar:
        line = bar.add_task("tokenizer", total=None)
        facts = train_tokenizer(
            corpus,
            out,
            type=kind,
            settings=given,
            processes=processes,
            documents=documents,
            field=field,
            progress=lambda done, total: bar.update(line, completed=done, total=total),
        )
    shown = ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in facts.items())
    console().print(f"{out}: {shown}", soft_wrap=True, markup=False)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_shown(count)} {name}" for name, count in value.items()) or "0"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
