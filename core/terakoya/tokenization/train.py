"""Trains a tokenizer of any kind from settings."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.components import Tokenizer
    from terakoya.corpus.corpus import Corpus


def make_tokenizer(settings: Mapping[str, Any], *, source: str = "tokenizer") -> Tokenizer:
    """Returns the component that `settings["type"]` names, with the other settings.

    Raises UserError, whose message begins with `source`, for an unknown type, an unknown setting or a wrong value.
    """
    from terakoya import plugins
    from terakoya.json_settings import explain

    fields = dict(settings)
    kind = fields.pop("type", None)
    names = plugins.registry().names("tokenizers")
    if not isinstance(kind, str):
        raise UserError(f"{source}: type: expected one of {', '.join(names)}, got {kind!r}")
    component: type[Tokenizer] = plugins.registry().component("tokenizers", kind)
    try:
        return component.model_validate(fields)
    except ValidationError as error:
        raise UserError("\n".join(f"{source}: {problem}" for problem in explain(error, component))) from None


def check_new_folder(folder: Path) -> None:
    """Raises UserError if `folder` exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: expected a new or empty folder, got one that is not empty; choose another --out")


def train_tokenizer(
    corpus: Corpus,
    folder: Path,
    *,
    settings: Mapping[str, Any],
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Mapping[str, Any]:
    """Trains the tokenizer of `settings` (`type` and the settings of that kind) and saves it in the folder `folder`.

    `folder` appears only when it is complete. Calls `progress(done_bytes, total_bytes)` from time to time. Returns the
    facts that the kind reports. Raises UserError for wrong settings and if `folder` exists and is not empty.
    """
    tokenizer = make_tokenizer(settings)
    folder = Path(folder)
    check_new_folder(folder)
    staging = folder.with_name(f".{folder.name}.staging-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        facts = tokenizer.train(corpus, staging, processes=processes, progress=progress)
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return facts
