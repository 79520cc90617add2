"""Recognises the kind of tokenizer in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.errors import UserError
from terakoya.folder_kinds import found, kind_of

if TYPE_CHECKING:
    from terakoya.components import Tokenizer


def recognise_tokenizer(folder: Path, *, type: str | None = None) -> Tokenizer:
    """Returns the tokenizer component that reads `folder`: of kind `type`, or of the only kind that can read it.

    Raises UserError if no kind, or more than one, can read it.
    """
    from terakoya import plugins

    if not folder.is_dir():
        raise UserError(
            f"{folder}: expected a tokenizer's folder, got {found(folder, 'tokenizer')}"
            + ("" if folder.exists() else "; make one with `terakoya tokenizer train`")
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
        raise UserError(f"{folder}: expected a tokenizer's folder, got {found(folder, 'tokenizer')}")
    files = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise UserError(
        f"{folder}: expected a tokenizer of kind {', '.join(names)}, got a folder with {files} that none of them reads"
    )
