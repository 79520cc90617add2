"""Loads the model to evaluate, from a Transformers folder or a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.inference.loading import load_model_and_tokenizer
from terakoya.runs.checkpoints import trained_length
from terakoya.toolkit.formats.model_folder import silence_transformers
from terakoya.toolkit.formats.transformers_folder import longest_input

Kind = Literal["causal", "masked"]
AUTO = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM}
LARGEST_WINDOW = 2048
"""Default length of a window, in tokens, for models that accept longer inputs."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with its tokenizer.

    Attributes:
        folder: the folder that both were loaded from.
        kind: decides which measure fits.
        length: largest number of tokens that the model accepts; None if it has no limit.
        trained_length: the longest rows that its run has trained on; None where it is not known.
    """

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    length: int | None
    trained_length: int | None = None

    def special_token_id(self, *names: str) -> int | None:
        """The id of the first special token in `names` that the tokenizer has."""
        return next(
            (number for name in names if (number := getattr(self.tokenizer, f"{name}_token_id")) is not None), None
        )

    def window(self, length: int | None) -> int:
        """The length of a window: `length`, or by default that of the rows of training, where it is known, else the
        model's limit, at most `LARGEST_WINDOW`. Raises UserError if the model does not accept `length` tokens."""
        if length is None:
            return min(self.trained_length or LARGEST_WINDOW, self.length or LARGEST_WINDOW, LARGEST_WINDOW)
        if self.length is not None and length > self.length:
            raise UserError(f"--length {length}: the model takes at most {self.length} tokens")
        return length


def load_folder(folder: Path, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> EvaluatedModel:
    """Loads the model of a Transformers folder; of a folder with `generator/` and `discriminator/` the generator.
    Raises UserError if there is no model, it is neither causal nor masked, weights are missing, or its code may not
    run."""
    if not (folder / "config.json").is_file() and (folder / "generator" / "config.json").is_file():
        folder = folder / "generator"
    config = _read_config(folder)
    kind = _kind(folder, config)
    with silence_transformers():
        model, tokenizer = load_model_and_tokenizer(AUTO[kind], folder, trust=trust_remote_code, dtype=dtype)
    return EvaluatedModel(folder, model.to(device).eval(), tokenizer, kind, longest_input(model))


def load_checkpoint(
    folder: Path, manifest: dict[str, Any], *, device: torch.device, dtype: torch.dtype
) -> EvaluatedModel:
    """Builds the model that a checkpoint exports from its `state/`; of several models the generator. Raises UserError
    if the model is neither causal nor masked, or plugins are missing."""
    from terakoya.conversion.export import build_models

    models = build_models(folder, manifest)
    model = models.get("", models.get("generator"))
    names = [type(exported).__name__ for exported in models.values()]
    if model is None:
        raise UserError(f"{folder}: exports {', '.join(names)}; evaluate it by its objective: --measure objective")
    with silence_transformers():
        tokenizer = load_tokenizer(folder / "tokenizer")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    kind = _kind(folder, config, model)
    return EvaluatedModel(
        folder, model.to(device, dtype).eval(), tokenizer, kind, longest_input(model), trained_length(manifest)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        there = describe_found(folder, "Transformers model")
        raise UserError(f"{folder}: expected a Transformers folder, a checkpoint or a run, got {there}") from None
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    assert isinstance(config, dict)
    return config


def _kind(folder: Path, config: dict[str, Any], model: PreTrainedModel | None = None) -> Kind:
    """The kind of the model, decided by the class that it was saved as. Raises UserError if it is neither kind."""
    names = config.get("architectures") or []
    model_type, auto_map = config.get("model_type"), config.get("auto_map") or {}
    tables: dict[Kind, Any] = {
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    for kind, table in tables.items():
        if any(name in table.values() for name in names) or AUTO[kind].__name__ in auto_map:
            return kind
    is_pretraining = any(name.endswith("ForPreTraining") for name in names)
    if model_type != "electra" and is_pretraining and model_type in tables["masked"]:
        return "masked"  # BERT's class with an additional head for next sentence prediction
    if model is not None and model.can_generate() and not model.config.is_encoder_decoder:
        return "causal"
    name = ", ".join(names) or model_type or "an unknown model"
    raise UserError(
        f"{folder}: {name} is neither a causal nor a masked language model: "
        "it has no perplexity; evaluate a run or a checkpoint by its objective"
    )
