"""`terakoya prepare`: raw text becomes a token store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from terakoya.commands.cleaning import Clean, CleanFolderOption, CleanOption, cleaned, read_clean
from terakoya.doctor.checks import cores
from terakoya.errors import UserError
from terakoya.preparation import conversation_options

if TYPE_CHECKING:
    from terakoya.components import Tokenizer
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import RemoteFile
    from terakoya.preparation.chat_template import ChatTemplate
    from terakoya.store.token_store import StoreFacts

Documents = Literal["blank", "line"]
Unit = Literal["document", "line"]
Specials = Literal["parse", "split", "reject"]
Engine = Literal["processes", "datatrove"]
Executor = Literal["local", "slurm", "ray"]


def recognise_tokenizer(folder: Path, *, type: str | None = None) -> Tokenizer:
    """The tokenizer component that reads `folder`: the kind `type`, or the one kind that says it can.

    Raises UserError if no kind, or more than one, can read it.
    """
    from terakoya import plugins

    if not folder.is_dir():
        raise UserError(
            f"{folder}: expected a tokenizer's folder, found none; make one with `terakoya tokenizer train`"
        )
    names = [type] if type is not None else plugins.registry().names("tokenizers")
    kinds = {name: plugins.registry().component("tokenizers", name) for name in names}
    able: dict[str, Tokenizer] = {}
    for fallback in (False, True):
        asked = {name: kind for name, kind in kinds.items() if kind.fallback == fallback and not able}
        able.update((name, found) for name, kind in asked.items() if (found := kind.from_folder(folder)) is not None)
    if len(able) == 1:
        return next(iter(able.values()))
    if able:
        raise UserError(f"{folder}: more than one kind of tokenizer reads it: choose with --type {'|'.join(able)}")
    files = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise UserError(
        f"{folder}: expected a tokenizer of kind {', '.join(names)}, got a folder with {files} that none of them reads"
    )


def prepare(
    sources: Sequence[Path | str | RemoteFile],
    *,
    tokenizer: Path,
    out: Path,
    type: str | None = None,
    processes: int | None = None,
    documents: Documents = "blank",
    field: str = "text",
    unit: Unit = "document",
    append_eos: bool = False,
    max_rejects: int | float = 0.01,
    special_tokens_in_text: Specials | None = None,
    max_document_bytes: int = 100_000_000,
    clean: Clean | None = None,
    clean_folder: Path | None = None,
    held_out: bool = False,
    shard: str | None = None,
    force: bool = False,
    conversations: bool = False,
    template: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoreFacts:
    """Encodes `sources` with the tokenizer in the folder `tokenizer` into the token store `out`.

    A source is a file, a folder, a pattern such as `text/*.parquet`, or an address such as `s3://bucket/wiki`.
    `clean`: cleaning steps, or a JSON file with a list of them; which documents they drop is noted in `clean_folder`,
    by default `OUT.clean` beside the store. `held_out`: takes the documents that the step `hold_out` sets aside,
    instead of the others. `shard`: `3/16` encodes that share of the corpus only. `conversations`: the files hold
    conversations, to be written as `template` says, which is `chat` (the tokenizer's own), `alpaca`, `alpaca_en` or a
    Jinja file; by default the tokenizer's own if it has one, else `alpaca`.

    Raises UserError for anything the user can mend; see `terakoya.preparation.local.prepare`.
    """
    from terakoya.process_pool import warm_up

    processes = processes or cores()
    if processes > 1:
        warm_up(["terakoya.preparation.encoding"])

    from terakoya.preparation.local import prepare as prepare_corpus
    from terakoya.preparation.sharding import Shard

    tokenizer = conversation_options.tokenizer_folder(tokenizer)
    corpus, component, found = opened(
        sources,
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
    return prepare_corpus(
        corpus,
        component,
        tokenizer,
        out,
        unit=unit,
        append_eos=append_eos,
        processes=processes,
        max_rejects=max_rejects,
        force=force,
        shard=Shard.parse(shard) if shard is not None else None,
        template=found,
        progress=progress,
    )


def opened(
    sources: Sequence[Path | str | RemoteFile],
    *,
    tokenizer: Path,
    out: Path,
    type: str | None,
    processes: int,
    documents: Documents,
    field: str,
    special_tokens_in_text: Specials | None,
    max_document_bytes: int,
    clean: Clean | None,
    clean_folder: Path | None,
    held_out: bool,
    conversations: bool,
    template: str | None,
) -> tuple[Corpus, Tokenizer, ChatTemplate | None]:
    """The corpus, with the plan of its cleaning made, the tokenizer, and the template of conversations that the
    arguments of `prepare` mean."""
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files

    if conversations:
        conversation_options.check(cleaning=clean is not None, held_out=held_out)
    steps = read_clean(clean)
    corpus = Corpus(
        find_files(sources),
        field=field,
        documents=documents,
        max_document_bytes=max_document_bytes,
        conversations=conversations,
    )
    component = recognise_tokenizer(tokenizer, type=type)
    found = conversation_options.template_of(component, tokenizer, template, conversations=conversations)
    corpus = cleaned(corpus, steps, clean_folder, out=out, processes=processes, held_out=held_out)
    if special_tokens_in_text is not None:
        component = component.model_copy(update={"special_tokens_in_text": special_tokens_in_text})
    return corpus, component, found


def parse_max_rejects(text: str) -> int | float:
    """A count ("100") or a share ("0.01", "1%") of rejected documents. UserError for anything else."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text) if "." in text else int(text)
    except ValueError:
        value = -1
    if value < 0 or (isinstance(value, float) and not value <= 1):
        raise UserError(f'--max-rejects: expected a count such as 100 or a share such as 0.01 or 1%, got "{text}"')
    return value


def command(
    context: typer.Context,
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
    slurm_array: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only print a script that does it in N Slurm jobs.", show_default=False),
    ] = None,
) -> None:
    """Encode text into a token store. Interrupted and started again, it finishes what is left."""
    from terakoya.commands import prepare_elsewhere
    from terakoya.log import console, progress_bar

    if slurm_array is not None:
        return prepare_elsewhere.print_script(context, shards=slurm_array)
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
