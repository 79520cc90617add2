"""`terakoya prepare`: raw text becomes a token store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from terakoya.commands.cleaning import CleanFolderOption, CleanOption
from terakoya.errors import UserError
from terakoya.preparation import conversation_options
from terakoya.preparation.prepare import Documents, Specials, Unit, opened, parse_max_rejects, prepare
from terakoya.process_pool import cores

if TYPE_CHECKING:
    pass

Engine = Literal["processes", "datatrove"]
Executor = Literal["local", "slurm", "ray"]


def command(
    corpus: Annotated[
        list[str],
        typer.Argument(help="jsonl, txt, csv, tsv (.gz, .zst, .xz, .bz2 too), parquet; folders, s3://, gs://, hf://."),
    ],
    tokenizer: Annotated[Path, typer.Option(help="The tokenizer's folder.")],
    out: Annotated[Path, typer.Option(help="The new store's folder.")],
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one for each CPU.", show_default=False)] = None,
    documents: Annotated[Documents, typer.Option(help="What separates documents in txt files.")] = "blank",
    field: Annotated[str, typer.Option(help="The key or column that holds the text.")] = "text",
    unit: Annotated[Unit, typer.Option(help="What a sequence is; lines and pairs layouts need line.")] = "document",
    append_eos: Annotated[bool, typer.Option("--append-eos", help="Store EOS after each document.")] = False,
    max_rejects: Annotated[str, typer.Option(help="Bad documents allowed: a count, or a share.")] = "0.01",
    type: Annotated[
        str | None, typer.Option(help="The tokenizer's kind. Default: recognised.", show_default=False)
    ] = None,
    special_tokens_in_text: Annotated[
        Specials | None,
        typer.Option(help="What [MASK] and the like in the text become. Default: parse.", show_default=False),
    ] = None,
    max_document_bytes: Annotated[int, typer.Option(min=1, help="Larger documents are rejected.")] = 100_000_000,
    clean: CleanOption = None,
    clean_folder: CleanFolderOption = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Take what the step hold_out sets aside, instead of the rest.")
    ] = False,
    shard: Annotated[
        str | None, typer.Option(help="Encode one share, such as 3/16; see `terakoya store merge`.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Throw away another store that OUT holds.")] = False,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="The files hold conversations, for the objective instruction.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="chat|alpaca|alpaca_en|FILE",
            help="Of conversations. Default: the tokenizer's own (chat) if it has one, else alpaca.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Who hands out the work: own processes, or datatrove.")] = "processes",
    executor: Annotated[
        Executor | None, typer.Option(help="datatrove's executor. Default: local.", show_default=False)
    ] = None,
    executor_settings: Annotated[
        Path | None, typer.Option(help="A JSON file with arguments of datatrove's executor.", show_default=False)
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One of those, such as partition=cpu; may be repeated."),
    ] = None,
) -> None:
    """Encode text into a token store. Interrupted and started again, it finishes what is left."""
    from terakoya.commands import prepare_elsewhere
    from terakoya.log import console, progress_bar

    if engine == "datatrove":
        processes = processes or cores()
        tokenizer = conversation_options.tokenizer_folder(tokenizer)
        text, component, found = opened(
            corpus,
            tokenizer=tokenizer,
            out=out,
            type=type,
            processes=processes,
            documents=documents,
            field=field,
            special_tokens_in_text=special_tokens_in_text,
            max_document_bytes=max_document_bytes,
            clean=clean,
            clean_folder=clean_folder,
            held_out=held_out,
            conversations=conversations,
            template=template,
        )
        return prepare_elsewhere.run_datatrove(
            text,
            component,
            tokenizer,
            out,
            unit=unit,
            append_eos=append_eos,
            max_rejects=parse_max_rejects(max_rejects),
            shard=shard,
            template=found,
            processes=processes,
            force=force,
            executor=executor or "local",
            settings_file=executor_settings,
            overrides=set or (),
        )
    if executor or executor_settings or set:
        raise UserError("--executor, --executor-settings, --set: expected --engine datatrove with them")
    with progress_bar("prepare") as progress:
        facts = prepare(
            corpus,
            tokenizer=tokenizer,
            out=out,
            type=type,
            processes=processes,
            documents=documents,
            field=field,
            unit=unit,
            append_eos=append_eos,
            max_rejects=parse_max_rejects(max_rejects),
            special_tokens_in_text=special_tokens_in_text,
            max_document_bytes=max_document_bytes,
            clean=clean,
            clean_folder=clean_folder,
            held_out=held_out,
            shard=shard,
            force=force,
            conversations=conversations,
            template=template,
            progress=progress,
        )
    console().print(prepare_elsewhere.in_words(out, facts), soft_wrap=True, markup=False)
