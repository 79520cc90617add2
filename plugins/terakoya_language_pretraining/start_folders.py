"""Entries of retarfi/language-pretraining's parameter.json that start from trained models: they name folders instead of
sizes."""

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
from terakoya.json_settings import explain, read_json, short_json

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
"""The sizes of an architecture: name in the file -> name in Transformers."""


LENGTH = "max_position_embeddings"


@dataclass(frozen=True)
class StartFolders:
    """An entry with the settings of its model folders.

    Attributes:
        entry: the entry, with sizes that it does not state filled in from the folder.
        architecture: the architecture's JSON: the folder's settings, overridden by those of the entry.
        generator: the generator's JSON, for an entry with two models.
        start_from: the run's `start_from`.
    """

    entry: Mapping[str, Any]
    architecture: dict[str, Any]
    generator: dict[str, Any] | None
    start_from: dict[str, Any]


def read_start_folders(raw: Mapping[str, Any], where: str, family: str) -> StartFolders | None:
    """Reads the folders that the entry `raw` names; None if it trains from scratch.

    As in the original, heads that a folder does not have are randomly initialised, and heads that the model does not
    have are ignored; both are printed.

    Raises:
        UserError: keys of another family, a missing folder, `flozen-layers` without a folder.
    """
    expected = PAIR if family == "electra" else {"": ONE}
    unexpected = [key for key in ({ONE, *PAIR.values()} - set(expected.values())) if key in raw]
    if unexpected:
        raise UserError(
            f"{where}: {', '.join(sorted(unexpected))}: has no effect in an entry of {family}; expected "
            + ", ".join(expected.values())
        )
    given = [key for key in expected.values() if key in raw]
    if not given:
        if FROZEN in raw:
            raise UserError(f"{where}.{FROZEN}: there is nothing to freeze without {', '.join(expected.values())}")
        return None
    missing = [key for key in expected.values() if key not in raw]
    if missing:
        raise UserError(f"{where}.{missing[0]}: missing; {given[0]} needs it")
    folders = {name: _find_folder(raw[key], f"{where}.{key}") for name, key in expected.items()}
    kind: type[Architecture] = plugins.registry().component("architectures", family)
    settings = {name: _read_settings(folder, kind) for name, folder in folders.items()}
    main = settings["discriminator" if family == "electra" else ""]
    stated = {name: raw[key] for key, name in SIZES.items() if key in raw}
    sizes = {key: main[name] for key, name in SIZES.items() if name in main}
    length = _max_sequence_length(kind, main, where)
    return StartFolders(
        entry={**sizes, **({"sequence-length": length} if length else {}), **raw},
        architecture={"type": family, **main, **stated},
        generator={"type": family, **settings["generator"]} if family == "electra" else None,
        start_from={
            "folder": {name: str(folder) for name, folder in folders.items()}
            if family == "electra"
            else str(folders[""]),
            "new_heads": True,
            "drop_heads": True,
        },
    )


def _find_folder(value: Any, where: str) -> Path:
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a folder, got {short_json(value)}")
    try:
        return model_folder(Path(value), where)
    except UserError as error:
        raise UserError(
            f"{error}. To resume a run no folder is needed: terakoya train RUN/parameters.json --out RUN"
        ) from None


def _read_settings(folder: Path, kind: type[Architecture]) -> dict[str, Any]:
    """The values in the folder's config of the settings that the architecture has.

    An architecture may count fewer positions than its config, as RoBERTa does; the difference is subtracted.
    """
    config = read_json(folder / "config.json")
    settings = {key: config[key] for key in kind.model_fields if key in config}
    if LENGTH in settings:
        with contextlib.suppress(ValidationError):  # _max_sequence_length reports it
            vocabulary = Vocabulary(size=config.get("vocab_size", 1), pad=config.get("pad_token_id"))
            rebuilt = kind.model_validate(settings).config(vocabulary)
            settings[LENGTH] -= getattr(rebuilt, LENGTH) - settings[LENGTH]
    return settings


def _max_sequence_length(kind: type[Architecture], settings: Mapping[str, Any], where: str) -> int | None:
    try:
        return kind.model_validate(settings).max_sequence_length()
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: its folder's {line}" for line in explain(error, kind))) from None
