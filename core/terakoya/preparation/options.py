"""The options of `terakoya prepare`: filled in by the command line, by a pipeline, or by `terakoya.prepare`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from terakoya.errors import UserError
from terakoya.process_pool import available_cores

if TYPE_CHECKING:
    from terakoya.corpus.cleaning_steps import StepsOrFile
    from terakoya.corpus.files import RemoteFile

Documents = Literal["blank", "line"]
Unit = Literal["document", "line"]
Specials = Literal["parse", "split", "reject"]
WordsSetting = str | Mapping[str, Any]
"""A word finder: its name, or its name as `type` beside its settings."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Which text becomes which token store, and how.

    Attributes:
        sources: files, folders, patterns such as `text/*.parquet`, and addresses such as `s3://bucket/wiki`.
        tokenizer: the tokenizer's folder, or its name on the Hugging Face Hub if it was downloaded before.
        out: the new store's folder.
        type: the tokenizer's registered name; None recognises it by its files.
        processes: number of processes; None is one for each CPU.
        documents: what separates documents in txt files: a blank line, or every line end.
        field: the key or column that holds the text.
        encoding: what files are that are not UTF-8, and whose encoding is not recognised; None rejects them.
        unit: what one sequence of the store is.
        append_eos: whether EOS is stored after each document.
        max_rejects: how many documents may be rejected, a count (int) or a share of all documents (float); empty
            ones do not count.
        special_tokens_in_text: what happens to `[MASK]` and the like in the text; None is the tokenizer's own setting.
        max_document_bytes: documents that are larger are rejected.
        clean: cleaning steps, or a JSON file with a list of them.
        clean_folder: folder that records which documents the steps drop; None is `OUT.clean` next to the store.
        held_out: whether to take the documents that the step `hold_out` sets aside, instead of the others.
        shard: `3/16` encodes that share of the corpus only; merged in order, the stores of all shares are the store of
            the corpus.
        force: whether to remove another store that `out` holds.
        conversations: whether the files hold conversations.
        words: the word finder whose words are stored: its name, or an object with `type` and its settings; None stores
            the words that the tokenizer knows, if it does.
        template: how conversations are written: `chat` (the tokenizer's own template), `alpaca`, `alpaca_en` or a Jinja
            file; None is the tokenizer's own template if it has one, else `alpaca`.
    """

    sources: Sequence[Path | str | RemoteFile]
    tokenizer: Path
    out: Path
    type: str | None = None
    processes: int | None = None
    documents: Documents = "blank"
    field: str = "text"
    encoding: str | None = None
    unit: Unit = "document"
    append_eos: bool = False
    max_rejects: int | float = 0.01
    special_tokens_in_text: Specials | None = None
    max_document_bytes: int = 100_000_000
    clean: StepsOrFile | None = None
    clean_folder: Path | None = None
    held_out: bool = False
    shard: str | None = None
    force: bool = False
    conversations: bool = False
    template: str | None = None
    words: WordsSetting | None = None

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
