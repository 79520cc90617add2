"""`terakoya clean`: decides what a cleaning drops before anything is made, in pieces on several machines."""

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
    """The options of `clean`."""

    corpus: Annotated[list[str], typer.Argument(help="Files, folders and addresses, as for `terakoya prepare`.")]
    clean: Annotated[Path, typer.Option(metavar="<path>", help="A list of cleaning steps, as JSON or YAML.")]
    out: Annotated[
        Path, typer.Option(help="The folder for the decisions, which other commands take as --clean-folder.")
    ]
    shard: Annotated[
        str | None,
        typer.Option(help="Read only these files, such as 3/16, and decide nothing yet.", show_default=False),
    ] = None
    processes: Annotated[int | None, PrepareOptions] = None
    documents: Annotated[Documents, PrepareOptions] = "blank"
    field: Annotated[str, PrepareOptions] = "text"
    encoding: Annotated[str | None, PrepareOptions] = None
    max_document_bytes: Annotated[int, PrepareOptions] = 100_000_000


def command(options: Options) -> None:
    """Decide which documents the cleaning steps drop. With --shard, copy the folders of all shards into one and run the
    command without it: it continues there."""
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.places import check_local
    from terakoya.preparation.sharding import Shard
    from terakoya.process_pool import available_cores
    from terakoya_cleaning.plan import add_cleaning, make_plan, write_shard
    from terakoya_cleaning.reading import load_steps

    check_local(options.out, "the folder of the cleaning plan")
    shard = None if options.shard is None else Shard.parse(options.shard)
    corpus = Corpus(find_files(options.corpus), max_document_bytes=options.max_document_bytes, **reading(options))
    corpus = add_cleaning(corpus, load_steps(options.clean), options.out)
    processes = options.processes or available_cores()
    if shard is None:
        make_plan(corpus, processes=processes)
        made = ("--type", "mecab_wordpiece", "--out", options.out.with_name("tokenizer"))
        read = next_command.reading_words(options, options.out)
        next_command.show("tokenizer", "train", *options.corpus, *read, *made)
    else:
        write_shard(corpus, shard, processes=processes)
        next_command.show("clean", *options.corpus, *next_command.reading_words(options), "--out", options.out)
