"""The options of `terakoya prepare`: filled in by the command line, by a pipeline, or by `terakoya.prepare`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from terakoya.errors import UserError
from terakoya.process_pool import available_cores

if TYPE_CHECKING:
    import typer

    from terakoya.corpus.cleaning import StepsOrFile
    from terakoya.corpus.files import Source

Documents = Literal["blank", "line"]
Unit = Literal["document", "line"]
Specials = Literal["parse", "split", "reject"]
WordsSetting = str | Mapping[str, Any]
"""A word finder: its name, or its name as `type` beside its settings."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Which text becomes which token store, and how. What the help of an option says is not repeated here.

    Attributes:
        sources: files, folders, patterns such as `text/*.parquet`, and places such as `s3://bucket/wiki`.
        tokenizer: its folder, or its name on the Hugging Face Hub if it was downloaded before.
        max_rejects: a count (int) or a share of all documents (float); empty ones do not count.
        clean: cleaning steps, or a JSON file with a list of them.
        clean_folder: records which documents the steps drop.
        shard: merged in order, the stores of all shards are the store of the corpus.
        words: the word finder whose words are stored: its name, or an object with `type` and its settings.
        template: `chat` (the tokenizer's own template), `alpaca`, `alpaca_en` or a Jinja file.
    """

    sources: Annotated[
        Sequence[Source | str],
        typer.Argument(
            metavar="CORPUS...",
            help="jsonl, txt, csv, tsv (.gz, .zst, .xz, .bz2 too), parquet; folders, s3://, gs://, hf://.",
            parser=str,
        ),
    ]
    tokenizer: Annotated[Path, typer.Option(help="The tokenizer's folder.")]
    out: Annotated[Path, typer.Option(help="The new store's folder.")]
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one for each CPU.", show_default=False)] = None
    documents: Annotated[Documents, typer.Option(help="What separates documents in txt files.")] = "blank"
    field: Annotated[
        str,
        typer.Option(
            "--field", "--text-key", help="The key or column that holds the text; text,body: the first that is there."
        ),
    ] = "text"
    encoding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What files are whose encoding is not recognised, such as shift_jis; utf-8: recognise none.",
            show_default=False,
        ),
    ] = None
    unit: Annotated[Unit, typer.Option(help="What one sequence is; the layouts lines and pairs need line.")] = (
        "document"
    )
    append_eos: Annotated[bool, typer.Option("--append-eos", help="Store EOS after each document.")] = False
    max_rejects: Annotated[
        int | float,
        typer.Option(
            metavar="<str>", help="Allowed rejected documents: a count, or a share.", parser=parse_max_rejects
        ),
    ] = 0.01
    type: Annotated[str | None, typer.Option(help="The tokenizer's type. Default: recognised.", show_default=False)] = (
        None
    )
    special_tokens_in_text: Annotated[
        Specials | None,
        typer.Option(help="What happens to [MASK] and the like in the text. Default: parse.", show_default=False),
    ] = None
    max_document_bytes: Annotated[int, typer.Option(min=1, help="Reject larger documents.")] = 100_000_000
    clean: Annotated[
        StepsOrFile | None,
        typer.Option(
            metavar="<path>", help="A list of cleaning steps, as JSON or YAML.", show_default=False, parser=Path
        ),
    ] = None
    clean_folder: Annotated[
        Path | None, typer.Option(help="Where --clean keeps its decisions. Default: OUT.clean.", show_default=False)
    ] = None
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Encode the documents that the step hold_out sets aside, not the others.")
    ] = False
    shard: Annotated[
        str | None, typer.Option(help="Encode one shard, such as 3/16; see `terakoya store merge`.", show_default=False)
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Remove another store that OUT holds.")] = False
    conversations: Annotated[
        bool, typer.Option("--conversations", help="The files hold conversations, for the objective instruction.")
    ] = False
    template: Annotated[
        str | None,
        typer.Option(
            metavar="chat|alpaca|alpaca_en|FILE",
            help="How conversations are written. Default: the tokenizer's own (chat) if it has one, else alpaca.",
            show_default=False,
        ),
    ] = None
    words: Annotated[
        WordsSetting | None,
        typer.Option(
            metavar="NAME|JSON",
            help="Whose words to store, for whole-word masking: mecab, spaces, or a plugin's. Default: the tokenizer's "
            "own, if it knows words.",
            show_default=False,
            parser=parse_words,
        ),
    ] = None

    @property
    def process_count(self) -> int:
        """Number of processes to use."""
        return self.processes or available_cores()


def parse_words(text: str | None) -> WordsSetting | None:
    """A word finder's name, or a JSON object with its name as `type`. Raises UserError for JSON that is no object."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        settings: Mapping[str, Any] = json.loads(text)
    except ValueError as error:
        raise UserError(f"--words: expected a word finder's name or a JSON object, got {text}: {error}") from None
    return settings


def parse_max_rejects(text: str) -> int | float:
    """A count ("100") or a share ("0.01", "1%") of rejected documents. Raises UserError for anything else."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text) if "." in text else int(text)
    except ValueError:
        value = -1
    if value < 0 or (isinstance(value, float) and not value <= 1):
        raise UserError(f'--max-rejects: expected a count such as 100 or a share such as 0.01 or 1%, got "{text}"')
    return value
