"""Entries of the field's original parameter.json that go on from trained models: they name folders, not sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from terakoya import plugins
from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.start_from import model_folder
from terakoya.errors import UserError
from terakoya.json_settings import explain, read_json, shown

ONE = "pretrained_model_name_or_path"
PAIR = {
    "generator": "pretrained_generator_model_name_or_path",
    "discriminator": "pretrained_discriminator_model_name_or_path",
}
FROZEN = "flozen-layers"
SIZES = {
    "number-of-layers": "num_hidden_layers",
    "hidden-size": "hidden_size",
    "ffn-inner-hidden-size": "intermediate_size",
    "attention-heads": "num_attention_heads",
    "embedding-size": "embedding_size",
}
"""The file's names of an architecture's sizes, and Transformers'."""


LENGTH = "max_position_embeddings"


@dataclass(frozen=True)
class StartFolders:
    """What the folders of an entry say.

    Attributes:
        entry: the entry with the sizes that it leaves to the folder filled in.
        architecture: the architecture's JSON: the folder's settings, and over them what the entry says itself.
        generator: the generator's JSON, for an entry with two models.
        start_from: the run's `start_from`.
    """

    entry: Mapping[str, Any]
    architecture: dict[str, Any]
    generator: dict[str, Any] | None
    start_from: dict[str, Any]


def read_start_folders(raw: Mapping[str, Any], where: str, family: str) -> StartFolders | None:
    """What the folders named by the entry `raw` say; None if it trains from scratch.

    Heads that a folder lacks are drawn and those without a place are left out, as the original does; both are printed.

    Raises:
        UserError: keys of another family, a folder that is not there, `flozen-layers` without a folder.
    """
    wanted = PAIR if family == "electra" else {"": ONE}
    foreign = [key for key in ({ONE, *PAIR.values()} - set(wanted.values())) if key in raw]
    if foreign:
        raise UserError(
            f"{where}: {', '.join(sorted(foreign))}: does nothing in an entry of {family}; expected "
            + " and ".join(wanted.values())
        )
    given = [key for key in wanted.values() if key in raw]
    if not given:
        if FROZEN in raw:
            raise UserError(f"{where}.{FROZEN}: there is nothing to freeze without {' and '.join(wanted.values())}")
        return None
    missing = [key for key in wanted.values() if key not in raw]
    if missing:
        raise UserError(f"{where}.{missing[0]}: missing; {given[0]} needs it")
    folders = {name: _folder(raw[key], f"{where}.{key}") for name, key in wanted.items()}
    kind: type[Architecture] = plugins.registry().component("architectures", family)
    found = {name: _settings(folder, kind) for name, folder in folders.items()}
    own = found["discriminator" if family == "electra" else ""]
    stated = {name: raw[key] for key, name in SIZES.items() if key in raw}
    sizes = {key: own[name] for key, name in SIZES.items() if name in own}
    length = _longest(kind, own, where)
    return StartFolders(
        entry={**sizes, **({"sequence-length": length} if length else {}), **raw},
        architecture={"type": family, **own, **stated},
        generator={"type": family, **found["generator"]} if family == "electra" else None,
        start_from={
            "folder": {name: str(folder) for name, folder in folders.items()}
            if family == "electra"
            else str(folders[""]),
            "new_heads": True,
            "drop_heads": True,
        },
    )


def _folder(value: Any, where: str) -> Path:
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a folder, got {shown(value)}")
    try:
        return model_folder(Path(value), where)
    except UserError as error:
        raise UserError(
            f"{error}. A run that has begun needs no folder: go on with terakoya train RUN/parameters.json --out RUN"
        ) from None


def _settings(folder: Path, kind: type[Architecture]) -> dict[str, Any]:
    """The folder's values of the settings that the architecture has.

    An architecture may count positions otherwise than its config does, as RoBERTa's does: what it adds is taken off.
    """
    config = read_json(folder / "config.json")
    settings = {key: config[key] for key in kind.model_fields if key in config}
    if LENGTH in settings:
        with contextlib.suppress(ValidationError):  # told where the whole is read
            vocabulary = Vocabulary(size=config.get("vocab_size", 1), pad=config.get("pad_token_id"))
            made = kind.model_validate(settings).config(vocabulary)
            settings[LENGTH] -= getattr(made, LENGTH) - settings[LENGTH]
    return settings


def _longest(kind: type[Architecture], settings: Mapping[str, Any], where: str) -> int | None:
    try:
        return kind.model_validate(settings).max_sequence_length()
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: its folder's {line}" for line in explain(error, kind))) from None
