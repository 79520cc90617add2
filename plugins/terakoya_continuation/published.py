"""A published model as a run of terakoya has it: its architecture, its objective, its tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from terakoya import plugins
from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.start_from import model_folder
from terakoya.errors import UserError, nearest
from terakoya.json_settings import explain, read_json
from terakoya.store.tokenizer_identity import FILES
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture
from terakoya.toolkit.formats.model_folder import former_rotary_keys

Kind = Literal["masked", "causal"]
OBJECTIVES: Mapping[Kind, str] = {"masked": "masked_lm", "causal": "causal_lm"}
LENGTHS: Mapping[Kind, int] = {"masked": 512, "causal": 2048}
"""Tokens of a row, where the model takes as many."""


@dataclass(frozen=True)
class PublishedModel:
    """A model in a Transformers folder.

    Attributes:
        name: the folder, or the name on the Hub, as the user wrote it.
        folder: where it is.
        kind: whether it learns from masked tokens, or each token from those before it.
        type: its `architecture.type`; `settings` are the other keys of `architecture`.
        packs: whether documents that share a row are kept apart.
        width: of its hidden states.
        length: tokens of a row.
        lacks_head: whether the folder has its body alone, so that the head begins at random.
    """

    name: str
    folder: Path
    kind: Kind
    type: str
    settings: Mapping[str, Any]
    packs: bool
    width: int
    length: int
    lacks_head: bool

    @property
    def architecture(self) -> dict[str, Any]:
        """The object `architecture` of the parameters."""
        return {"type": self.type, **self.settings}


def read_model(name: str) -> PublishedModel:
    """Reads the config of the model in the folder `name`, or of that name in the Hub's cache.

    Raises:
        UserError: there is no model or no tokenizer, the architecture is none that terakoya has, or the model is
            neither masked nor causal.
    """
    folder = model_folder(Path(name), "--from")
    if not any((folder / file).is_file() for file in FILES):
        raise UserError(
            f"--from: {name}: has no tokenizer; expected one of {', '.join(FILES)}: copy the tokenizer that the model "
            "was trained with there"
        )
    config = read_json(folder / "config.json")
    kind_name, component = _find_architecture(name, config)
    kind, lacks_head = _find_head(name, config, component)
    settings = _read_settings(name, config, component)
    architecture = component.model_validate(settings)
    length = min(architecture.max_sequence_length() or LENGTHS[kind], LENGTHS[kind])
    return PublishedModel(
        name, folder, kind, kind_name, settings, architecture.document_masking != "none",
        int(settings["hidden_size"]), length, lacks_head,
    )  # fmt: skip


def _find_architecture(name: str, config: Mapping[str, Any]) -> tuple[str, type[TransformersArchitecture]]:
    import transformers

    registry = plugins.registry()
    known: dict[str, tuple[str, type[TransformersArchitecture]]] = {}
    for each in registry.names("architectures"):
        component: type[Architecture] = registry.component("architectures", each)
        if issubclass(component, TransformersArchitecture) and hasattr(transformers, component.config_class):
            known[getattr(transformers, component.config_class).model_type] = (each, component)
    model_type = str(config.get("model_type"))
    if model_type not in known:
        raise UserError(
            f'--from: {name}: is a model of type "{model_type}", which no architecture has; expected one of '
            f"{', '.join(sorted(known))}{nearest(model_type, known)}; a plugin can add one (terakoya plugins new)"
        )
    return known[model_type]


def _find_head(name: str, config: Mapping[str, Any], component: type[TransformersArchitecture]) -> tuple[Kind, bool]:
    """Returns what the model learns, and whether its head is missing."""
    classes: Sequence[str] = config.get("architectures") or ()
    for kind in OBJECTIVES:
        if kind in component.heads:
            whole = {component.model_classes.get(head) for head in (kind, "pretraining")}
            body = component.model_classes.get("body")
            if not classes or whole & {*classes}:
                return kind, False
            if body in classes or any(each.endswith("Model") for each in classes):
                return kind, True
            expected = component.model_classes[kind]
            raise UserError(f"--from: {name}: expected a model of class {expected}, got {', '.join(classes)}")
    raise UserError(
        f"--from: {name}: {', '.join(classes) or component.__name__} is neither a masked nor a causal language model"
    )


def _read_settings(name: str, config: Mapping[str, Any], component: type[TransformersArchitecture]) -> dict[str, Any]:
    """Returns the settings of the architecture as the config has them.

    Raises:
        UserError: the architecture does not have one of these values.
    """
    import transformers

    read = getattr(transformers, component.config_class).from_dict(dict(config))
    former = former_rotary_keys(read.to_dict())
    values = {key: getattr(read, key, None) for key in component.model_fields if key != "rope_scaling"}
    values |= former | {key: config[key] for key in component.model_fields if key in config}
    settings = {key: value for key, value in values.items() if value is not None and key in component.model_fields}
    try:
        with contextlib.suppress(AttributeError, TypeError):
            vocabulary = Vocabulary(size=config.get("vocab_size", 1), pad=config.get("pad_token_id"))
            built = component.model_validate(settings).config(vocabulary)
            key = "max_position_embeddings"  # RoBERTa's config counts those before its first position, too
            settings[key] -= getattr(built, key) - settings[key]
        component.model_validate(settings)
    except ValidationError as error:
        lines = explain(error, component)
        raise UserError("\n".join(f"--from: {name}: config.json: {line}" for line in lines)) from None
    return settings
