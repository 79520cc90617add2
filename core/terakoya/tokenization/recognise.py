"""Recognises the kind of tokenizer in a folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya import plugins
from terakoya.components.tokenizer import RECORD, load_tokenizer
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, kind_of, refuse_pointers
from terakoya.json_settings import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from terakoya.components import Tokenizer

logger = logging.getLogger("terakoya")


def recognise_tokenizer(folder: Path, *, type: str | None = None) -> Tokenizer:
    """Returns the tokenizer component that reads `folder`: of kind `type`, or of the only kind that can read it. Raises
    UserError if no kind, or more than one, can read it, if a file of it is a pointer of Git LFS, and without `type` if
    the kind that the folder records is not there: another kind would give other ids, or no word starts."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: expected a tokenizer's folder, got {describe_found(folder, 'tokenizer')}"
            + ("" if folder.exists() else "; make one with `terakoya tokenizer train`")
        )
    refuse_pointers(file for file in folder.iterdir() if file.suffix in (".json", ".txt", ".model") and file.is_file())
    recorded = _recorded_kind(folder) if type is None else None
    if recorded is not None and recorded not in plugins.registry().names("tokenizers"):
        raise UserError(
            f"{folder}: tokenizer type {recorded}, which made it, is missing: load its plugin (terakoya --plugin FILE "
            "..., or install it); `prepare --type huggingface` reads the folder as Transformers does, without word "
            "starts that only the plugin knows"
        )
    names = [type] if type is not None else plugins.registry().names("tokenizers")
    kinds = {name: plugins.registry().component("tokenizers", name) for name in names}
    readers: dict[str, Tokenizer] = {}
    for fallback in (False, True):
        candidates = {name: kind for name, kind in kinds.items() if kind.fallback == fallback and not readers}
        for name, kind in candidates.items():
            if (tokenizer := kind.from_folder(folder)) is not None:
                readers[name] = tokenizer
    if len(readers) == 1:
        return next(iter(readers.values()))
    if readers:
        raise UserError(f"{folder}: more than one kind of tokenizer reads it: choose with --type {'|'.join(readers)}")
    if kind_of(folder) not in ("tokenizer", None):
        raise UserError(f"{folder}: expected a tokenizer's folder, got {describe_found(folder, 'tokenizer')}")
    files = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise UserError(
        f"{folder}: expected a tokenizer of kind {', '.join(names)}, got a folder with {files} that none of them reads"
    )


def load_decoder(folder: Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer in `folder`, to turn ids into text: as its kind loads it. Where the plugin of that kind is
    missing, as Transformers loads it, with a warning: only cutting text into tokens needs the plugin. Raises UserError
    as `recognise_tokenizer` does, also where Transformers cannot load the folder."""
    recorded = _recorded_kind(folder) if folder.is_dir() else None
    if recorded is None or recorded in plugins.registry().names("tokenizers"):
        return recognise_tokenizer(folder).load(folder)
    logger.warning(
        "%s: tokenizer type %s, which made it, is missing: Transformers alone turns its ids into text", folder, recorded
    )
    return load_tokenizer(folder)


def _recorded_kind(folder: Path) -> str | None:
    """The kind of tokenizer that the folder's record names; None where it has no record."""
    file = folder / RECORD
    kind = read_json(file).get("type") if file.is_file() else None
    return kind if isinstance(kind, str) else None
