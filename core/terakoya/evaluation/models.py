"""The model that is evaluated: a Transformers folder, or what a checkpoint exports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto import modeling_auto

from terakoya.errors import UserError
from terakoya.inference.loading import load_model_and_tokenizer, max_length
from terakoya.training.model.start_config import silence_transformers

Kind = Literal["causal", "masked"]
AUTO = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM}
LONGEST = 2048
"""The length of a window where the model would take more, or any."""


@dataclass(frozen=True)
class Subject:
    """A model with its tokenizer.

    Attributes:
        folder: where both came from.
        kind: which measure fits.
        length: the longest row that the model takes, None where it has no bound.
    """

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    length: int | None

    def special(self, *names: str) -> int | None:
        """The id of the first of the tokenizer's special tokens `names` that it has."""
        return next(
            (number for name in names if (number := getattr(self.tokenizer, f"{name}_token_id")) is not None), None
        )

    def window(self, asked: int | None) -> int:
        """The length of a row: as `asked` for, else the model's own, at most `LONGEST`.

        Raises:
            UserError: the model takes no such row.
        """
        if asked is None:
            return min(self.length or LONGEST, LONGEST)
        if self.length is not None and asked > self.length:
            raise UserError(f"--length {asked}: the model takes at most {self.length} tokens")
        return asked


def from_folder(folder: Path, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> Subject:
    """The model in a Transformers folder; of one that holds `generator/` and `discriminator/` the generator.

    Raises:
        UserError: there is none, it is neither causal nor masked, weights are missing, or its code may not be run.
    """
    if not (folder / "config.json").is_file() and (folder / "generator" / "config.json").is_file():
        folder = folder / "generator"
    config = _config(folder)
    kind = _kind(folder, config)
    with silence_transformers():
        model, tokenizer = load_model_and_tokenizer(AUTO[kind], folder, trust=trust_remote_code, dtype=dtype)
    return _subject(folder, model.to(device), tokenizer, kind)


def from_checkpoint(folder: Path, manifest: dict[str, Any], *, device: torch.device, dtype: torch.dtype) -> Subject:
    """The model that a checkpoint exports, built from its `state/`; of several the generator.

    Raises:
        UserError: it is neither causal nor masked, or plugins are missing.
    """
    from terakoya.conversion.export import build_models

    models = build_models(folder, manifest)
    model = models.get("", models.get("generator"))
    names = [type(each).__name__ for each in models.values()]
    if model is None:
        raise UserError(f"{folder}: exports {', '.join(names)}; evaluate it by its objective: --measure objective")
    with silence_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    described = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return _subject(folder, model.to(device, dtype), tokenizer, _kind(folder, described, model))


def _subject(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: Kind) -> Subject:
    return Subject(folder, model.eval(), tokenizer, kind, max_length(model))


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: expected a Transformers folder, a checkpoint or a run, found neither config.json nor "
            "manifest.json nor checkpoints"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    assert isinstance(config, dict)
    return config


def _kind(folder: Path, config: dict[str, Any], model: PreTrainedModel | None = None) -> Kind:
    """Which of Transformers' two classes loads the model, by the class that it was saved as."""
    names = config.get("architectures") or []
    kind, own = config.get("model_type"), config.get("auto_map") or {}
    tables: dict[Kind, Any] = {
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    for each, table in tables.items():
        if any(name in table.values() for name in names) or AUTO[each].__name__ in own:
            return each
    if kind != "electra" and any(name.endswith("ForPreTraining") for name in names) and kind in tables["masked"]:
        return "masked"  # BERT's, with the head for next sentences beside it
    if model is not None and model.can_generate() and not model.config.is_encoder_decoder:
        return "causal"
    raise UserError(
        f"{folder}: {', '.join(names) or kind or 'an unknown model'} is neither a causal nor a masked language model: "
        "it has no perplexity; a run or a checkpoint can be evaluated by its objective"
    )


def same_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Whether the tokenizer in `folder` has the same pieces under the same ids."""
    with silence_transformers():
        other = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return bool(tokenizer.get_vocab() == other.get_vocab())
