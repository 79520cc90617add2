"""Which kind of tokenizer a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.components import Tokenizer


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
