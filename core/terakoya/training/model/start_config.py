"""Whether the config of a folder that a run starts from says what the run's own says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from terakoya.components import Architecture
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError

WITHOUT_MEANING = frozenset({"vocab_size", "use_cache"})
"""Of a config: what is compared otherwise, and what says nothing of weights."""
DROPOUT = "_pdrop"
"""How GPT-2's and GPT-J's configs call dropout."""
OF_OTHER_HEADS = ("classifier_", "summary_", "sparse_", "deterministic_")
"""How settings begin that belong to heads for other tasks, or to ways of computing."""


@contextmanager
def silence_transformers() -> Iterator[None]:
    """While open, Transformers neither reports nor draws bars: what it has to say is in its loading info."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def architecture_settings(parameters: Parameters) -> frozenset[str]:
    """The names of the settings of every architecture in `parameters`."""
    nested = [value for value in dict(parameters.objective).values() if isinstance(value, Architecture)]
    return frozenset(key for each in [parameters.architecture, *nested] for key in type(each).model_fields)


def read_config(folder: Path, target: PreTrainedModel, where: str) -> PretrainedConfig:
    """The folder's config, of the class that `target` has.

    Raises:
        UserError: it cannot be read, or is of another model type.
    """
    kind = type(target.config)
    try:
        with silence_transformers():
            raw, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: config.json cannot be read: {error}") from error
    if raw.get("model_type") != kind.model_type:
        raise UserError(
            f"{where}: is a model of type {json.dumps(raw.get('model_type'))}, the architecture is of type "
            f'"{kind.model_type}"; expected a folder of the same'
        )
    config: PretrainedConfig = kind.from_dict(raw)
    return config


def compare_settings(
    source: PretrainedConfig, target: PretrainedConfig, architecture_settings: frozenset[str]
) -> tuple[list[str], list[str]]:
    """The settings of the model that differ: those that say what weights mean, and those that a run may choose."""
    wrong, free = [], []
    theirs, ours = source.to_dict(), target.to_dict()
    general = PretrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for key in ours:
        if key in general or key in WITHOUT_MEANING or key.startswith(OF_OTHER_HEADS):
            continue
        if key not in theirs or theirs[key] == ours[key]:
            continue
        text = f"{key} is {json.dumps(theirs[key])} there and {json.dumps(ours[key])} in the parameters"
        if key.endswith(DROPOUT) or "dropout" in key or key.startswith("initializer") or key.endswith("_token_id"):
            free.append(f"{text}, which stands")
        elif key in architecture_settings:
            wrong.append(f"{text}; set it to the folder's")
        else:
            wrong.append(f"{text}; it follows from other settings, or the architecture has none for it")
    return wrong, free
