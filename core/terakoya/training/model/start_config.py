"""Compares the config.json of a folder that a run starts from with the config of the run's own model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from terakoya.components import Architecture
from terakoya.config.start_from import StartFrom
from terakoya.errors import UserError
from terakoya.toolkit.formats.model_folder import silence_transformers

NOT_COMPARED = frozenset({"vocab_size", "use_cache"})
"""Keys of a config that are compared elsewhere, or do not concern weights."""
DROPOUT = "_pdrop"
"""Ending of the dropout keys in GPT-2's and GPT-J's configs."""
OF_OTHER_HEADS = ("classifier_", "summary_", "sparse_", "deterministic_")
"""Beginnings of keys that concern heads for other tasks, or ways to compute."""

DEPTH_KEYS = frozenset({"num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "layer_types"})
"""Keys of configs that differ where a model has more blocks."""
WIDTH_KEYS = frozenset(
    {"hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "d_ff", "num_attention_heads", "n_head",
     "num_heads", "num_key_value_heads", "pooler_hidden_size"}
)  # fmt: skip
"""Keys of configs that differ where a model is wider."""
POSITION_KEYS = frozenset({"rope_parameters", "max_position_embeddings"})
"""Keys of configs of models with rotary positions that no weight depends on."""


def architecture_settings(architectures: Sequence[Architecture]) -> frozenset[str]:
    """The names of all settings of `architectures`."""
    return frozenset(key for architecture in architectures for key in type(architecture).model_fields)


def grown_keys(settings: StartFrom) -> frozenset[str]:
    """Returns the keys of a config that may differ between a model and the larger one that `settings` make of it."""
    ways = settings.ways_to_grow
    return (WIDTH_KEYS if "tile" in ways else frozenset()) | (DEPTH_KEYS if set(ways) - {"tile"} else frozenset())


def read_config(
    folder: Path, target: PreTrainedModel, where: str, architectures: Sequence[Architecture] = ()
) -> PretrainedConfig:
    """Returns the folder's config, as the config class of `target`; of another type where one of `architectures` has
    the `same_weights`. Raises UserError if it cannot be read, or is of another model type."""
    kind = type(target.config)
    try:
        with silence_transformers():
            raw, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: config.json cannot be read: {error}") from error
    same_weights = {name for each in architectures for name in each.same_weights}
    if raw.get("model_type") in same_weights:
        raw["model_type"] = kind.model_type
    if raw.get("model_type") != kind.model_type:
        raise UserError(
            f"{where}: is a model of type {json.dumps(raw.get('model_type'))}, the architecture is of type "
            f'"{kind.model_type}"; expected a folder with a model of this type'
        )
    config: PretrainedConfig = kind.from_dict(raw)
    return config


def _without_synonyms(value: Any) -> Any:
    """Returns the value of a config without what older versions of Transformers write into rotary positions: their type
    under a second name, and keys without a value."""
    if not isinstance(value, Mapping):
        return value
    old = {"type"} if "rope_type" in value else set()
    return {key: _without_synonyms(each) for key, each in value.items() if key not in old and each is not None}


def compare_settings(
    source: PretrainedConfig, target: PretrainedConfig, settable: frozenset[str], settings: StartFrom | None = None
) -> tuple[list[str], list[str]]:
    """Returns the settings that differ between two configs, one line each: those that change the meaning of weights,
    and those that a run may choose.

    Args:
        settable: the settings of the run's architectures.
        settings: may allow that the run's model is larger, or has other rotary positions.
    """
    conflicts, allowed = [], []
    grown = grown_keys(settings) if settings is not None else frozenset()
    theirs, ours = source.to_dict(), target.to_dict()
    general = PretrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for key in ours:
        if key in general or key in NOT_COMPARED or key in grown or key.startswith(OF_OTHER_HEADS):
            continue
        if key not in theirs or _without_synonyms(theirs[key]) == _without_synonyms(ours[key]):
            continue
        setting = next(
            (alias for alias, name in target.attribute_map.items() if name == key and alias in settable), key
        )
        text = f"{setting} is {json.dumps(theirs[key])} there and {json.dumps(ours[key])} in the parameters"
        if key.endswith(DROPOUT) or "dropout" in key or key.startswith("initializer") or key.endswith("_token_id"):
            allowed.append(f"{text}; the parameters' value is used")
        elif key in POSITION_KEYS and "rope_parameters" in ours:
            if settings is not None and settings.new_positions:
                allowed.append(f"{text}; the parameters' value is used")
            else:
                conflicts.append(f"{text}; set it to the folder's, or allow another with start_from.new_positions")
        elif setting in settable:
            larger = key in DEPTH_KEYS | WIDTH_KEYS and isinstance(ours[key], int) and ours[key] > (theirs[key] or 0)
            grows = f"{text}; set it to the folder's, or choose a start_from.grow"
            conflicts.append(grows if larger else f"{text}; set it to the folder's")
        else:
            conflicts.append(f"{text}; it follows from other settings, or the architecture has no setting for it")
    return conflicts, allowed
