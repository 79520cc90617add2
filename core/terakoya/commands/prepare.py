"""`terakoya prepare` encodes raw text into a token store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.commands import shared_options as shared
from terakoya.commands.guidance import next_command
from terakoya.preparation.options import PrepareOptions, Specials, Unit, parse_max_rejects, parse_words

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts


def command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS...",
            help="jsonl, txt, csv, tsv (.gz, .zst, .xz, .bz2 too), parquet; folders, s3://, gs://, hf://.",
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(help="The tokenizer's folder.")],
    out: Annotated[Path, typer.Option(help="The new store's folder.")],
    processes: shared.ProcessesOption = None,
    documents: shared.DocumentsOption = "blank",
    field: shared.FieldOption = "text",
    encoding: shared.EncodingOption = None,
    unit: Annotated[
        Unit, typer.Option(help="What one sequence is; the layouts lines and pairs need line.")
    ] = "document",
    append_eos: Annotated[bool, typer.Option("--append-eos", help="Store EOS after each document.")] = False,
    max_rejects: shared.MaxRejectsOption = "0.01",
    type: Annotated[
        str | None, typer.Option(help="The tokenizer's type. Default: recognised.", show_default=False)
    ] = None,
    special_tokens_in_text: Annotated[
        Specials | None,
        typer.Option(help="What happens to [MASK] and the like in the text. Default: parse.", show_default=False),
    ] = None,
    max_document_bytes: Annotated[int, typer.Option(min=1, help="Reject larger documents.")] = 100_000_000,
    clean: shared.CleanOption = None,
    clean_folder: shared.CleanFolderOption = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Encode the documents that the step hold_out sets aside, not the others.")
    ] = False,
    shard: Annotated[
        str | None, typer.Option(help="Encode one shard, such as 3/16; see `terakoya store merge`.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Remove another store that OUT holds.")] = False,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="The files hold conversations, for the objective instruction.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="chat|alpaca|alpaca_en|FILE",
            help="How conversations are written. Default: the tokenizer's own (chat) if it has one, else alpaca.",
            show_default=False,
        ),
    ] = None,
    words: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|JSON",
            help="Whose words to store, for whole-word masking: mecab, spaces, or a plugin's. Default: the tokenizer's "
            "own, if it knows words.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Encode text into a token store. After an interruption, the same command finishes the rest."""
    # the first statement: locals() holds the arguments and nothing else
    options = options_of(locals())

    from terakoya.log import progress_bar
    from terakoya.preparation.prepare import prepare_store

    with progress_bar("prepare") as progress:
        facts = prepare_store(options, progress=progress)
    show(options, facts)


def options_of(arguments: Mapping[str, Any]) -> PrepareOptions:
    """Returns the options that the command's arguments mean, and says that the corpus is looked at. Raises UserError
    for a wrong number of rejects and wrong words."""
    from terakoya.log import announce

    given = {**arguments, "max_rejects": parse_max_rejects(arguments["max_rejects"])}
    given["words"] = parse_words(arguments["words"])
    options = PrepareOptions(**{option.name: given[option.name] for option in dataclasses.fields(PrepareOptions)})
    announce(f"terakoya prepare: looks at the corpus for {options.out} ...")
    return options


def show(options: PrepareOptions, facts: StoreFacts) -> None:
    """Prints what the finished store holds, and the next command."""
    from terakoya.log import console

    console().print(_describe(options.out, facts), soft_wrap=True, markup=False)
    if options.shard is None:
        next_command.after_store(options.out, facts)


def _describe(out: Path, facts: StoreFacts) -> str:
    from terakoya.log import plural

    return (
        f"{out}: {facts.documents:,} document{plural(facts.documents)}, "
        f"{facts.sequences:,} sequence{plural(facts.sequences)}, {facts.tokens:,} tokens; "
        f"{facts.rejected:,} document{plural(facts.rejected)} rejected"
    )
