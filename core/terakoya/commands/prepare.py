"""`terakoya prepare` encodes raw text into a token store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from terakoya.commands import shared_options as shared
from terakoya.commands.guidance import next_command
from terakoya.errors import UserError
from terakoya.preparation.options import PrepareOptions, Specials, Unit, parse_max_rejects, parse_words

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts

Engine = Literal["processes", "datatrove"]
Executor = Literal["local", "slurm", "ray"]


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
    engine: Annotated[
        Engine, typer.Option(help="What runs the work: terakoya's own processes, or datatrove.")
    ] = "processes",
    executor: Annotated[
        Executor | None, typer.Option(help="datatrove's executor. Default: local.", show_default=False)
    ] = None,
    executor_settings: Annotated[
        Path | None, typer.Option(help="A JSON file with arguments of datatrove's executor.", show_default=False)
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="One of these arguments, such as partition=cpu; may be repeated."
        ),
    ] = None,
) -> None:
    """Encode text into a token store. After an interruption, the same command finishes the rest."""
    # the first statement: locals() holds the arguments and nothing else
    arguments = {**locals(), "max_rejects": parse_max_rejects(max_rejects), "words": parse_words(words)}
    options = PrepareOptions(**{option.name: arguments[option.name] for option in dataclasses.fields(PrepareOptions)})

    from terakoya.log import announce, console, progress_bar

    announce(f"terakoya prepare: looks at the corpus for {out} ...")
    from terakoya.preparation.prepare import prepare_store

    if engine == "datatrove":
        facts = _run_datatrove(options, executor or "local", executor_settings, set or ())
    elif executor or executor_settings or set:
        raise UserError("--executor, --executor-settings, --set: expected --engine datatrove with them")
    else:
        with progress_bar("prepare") as progress:
            facts = prepare_store(options, progress=progress)
    if facts is None:
        return
    console().print(_describe(out, facts), soft_wrap=True, markup=False)
    if shard is None:
        next_command.after_store(out, facts)


def _run_datatrove(
    options: PrepareOptions, executor: Executor, settings_file: Path | None, overrides: Sequence[str]
) -> StoreFacts | None:
    """Makes the store with `executor` and returns its facts; or prints the submitted jobs and returns None."""
    from terakoya.json_settings import apply_overrides, read_settings
    from terakoya.log import console
    from terakoya.preparation.datatrove_settings import executor_settings
    from terakoya.preparation.prepare import create_job

    try:
        from terakoya.preparation.datatrove import SubmittedJobs, prepare_with_datatrove
    except ModuleNotFoundError as error:
        raise UserError(f'--engine datatrove: {error}; needs datatrove: pip install "terakoya[datatrove]"') from error
    settings = apply_overrides(read_settings(settings_file) if settings_file is not None else {}, overrides)
    executor_settings(executor, settings)  # before the corpus is read
    result = prepare_with_datatrove(create_job(options), executor=executor, settings=settings)
    if not isinstance(result, SubmittedJobs):
        return result
    encoding = f"job {result.encode} encodes, job" if result.encode is not None else "every part exists, job"
    store = options.out / "store.json"
    text = f"submitted: {encoding} {result.join} then joins; {options.out} is finished when there is {store}"
    console().print(text, soft_wrap=True, markup=False)
    return None


def _describe(out: Path, facts: StoreFacts) -> str:
    from terakoya.log import plural

    return (
        f"{out}: {facts.documents:,} document{plural(facts.documents)}, "
        f"{facts.sequences:,} sequence{plural(facts.sequences)}, {facts.tokens:,} tokens; "
        f"{facts.rejected:,} document{plural(facts.rejected)} rejected"
    )
