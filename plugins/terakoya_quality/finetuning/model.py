"""Loads a finished model with a new head for a task, writes it, and finds the folder that a user names."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from terakoya.components.tokenizer import load_tokenizer
from terakoya.conversion.export import export
from terakoya.conversion.import_checkpoint import copy_tokenizer
from terakoya.errors import UserError
from terakoya.inference.loading import custom_code_files, find_model, load_model_and_tokenizer
from terakoya.runs.finding import names_checkpoint
from terakoya.toolkit.fast_products import multiplies_fast
from terakoya.toolkit.formats import folder_digests, transformers_folder
from terakoya.toolkit.formats.model_folder import silence_transformers
from terakoya_quality.finetuning.task import Task

FAMILIES = {
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMultipleChoice": modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}
"""Auto class -> the families for which Transformers has such a model."""

KEPT_LAYERS = frozenset({"pooler", "head"})
"""Layers outside of the base model that are no new head: poolers, and what ModernBERT's masked model has, too."""


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """How a finished model is loaded and computed.

    Attributes:
        device: where it is.
        precision: fp32, or bf16 for the matrix products.
        trust: whether to run Python code that its folder contains.
    """

    device: torch.device
    precision: str = "fp32"
    trust: bool = False

    @classmethod
    def for_training(cls, device: torch.device, precision: str | None, *, trust: bool) -> ModelUse:
        """Returns how a model is fine-tuned on `device`: without a `precision` in bf16 where it multiplies that fast,
        else in fp32."""
        suited = "bf16" if multiplies_fast("bf16", device) else "fp32"
        return cls(device=device, precision=precision or suited, trust=trust)


@contextmanager
def finished_model(source: Path) -> Iterator[Path]:
    """Yields the Transformers folder that `source` means: itself, its discriminator, or the export of a run, RUN@STEP
    or checkpoint, which is there as long as the block runs. Raises UserError if there is no model."""
    if not names_checkpoint(source):
        yield find_model(source)[0]
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export(source, folder)
        yield find_model(folder)[0]


def load_fast_tokenizer(folder: Path, *, trust: bool, needs_offsets: bool) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of `folder`; of MeCab's words the fast one, which has the same ids.

    Raises:
        UserError: it cannot be loaded, or does not say which characters a token is where that is needed.
    """
    if (code := custom_code_files(folder)) and not trust:
        raise UserError(f"{folder}: contains code of its own, {', '.join(code)}; --trust-remote-code runs it")
    with silence_transformers():
        tokenizer = load_tokenizer(folder, trust_remote_code=trust)
        if not tokenizer.is_fast and type(tokenizer).__name__ == "BertJapaneseTokenizer":
            from terakoya_tokenizer import BertJapaneseTokenizerFast

            tokenizer = BertJapaneseTokenizerFast.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    if needs_offsets and not tokenizer.is_fast:
        raise UserError(
            f"{folder}: its tokenizer, {type(tokenizer).__name__}, does not say which characters a token is, which "
            "this task needs; use a model with a fast tokenizer, or with one of MeCab's words"
        )
    return tokenizer


def load_with_head(folder: Path, task: Task[Any], *, seed: int, trust: bool, pad: int | None = None) -> PreTrainedModel:
    """Returns the model of `folder` with a head for `task`, whose weights are random: a function of `seed`. Its config
    has the id `pad`, by which causal models find the end of a text.

    Raises:
        UserError: Transformers has no such model of this family, or weights below the head are missing.
    """
    random: set[str] = set()

    def is_new(model: PreTrainedModel, name: str) -> bool:
        random.add(name)
        return is_of_head(model, name)

    with silence_transformers():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        auto, settings = _head_class(folder, config, task)
        torch.manual_seed(seed)
        model, _ = load_model_and_tokenizer(
            getattr(transformers, auto), folder, trust=trust, is_new=is_new, ignore_mismatched_sizes=True,
            dtype=torch.float32, **settings,
        )  # fmt: skip
        _initialise_head(model, random)
    if pad is not None:
        model.config.pad_token_id = pad
    loaded: PreTrainedModel = model
    return loaded


def _head_class(folder: Path, config: Any, task: Task[Any]) -> tuple[str, dict[str, Any]]:
    """Returns the Auto class for `task`, and the settings of the head. Choices are scored one by one, as texts with one
    number each, by families for which Transformers has no model with choices."""
    if config.is_encoder_decoder:
        raise UserError(f"{folder}: {config.model_type} is an encoder-decoder; expected an encoder or a causal model")
    known = {name for name in FAMILIES if config.model_type in FAMILIES[name]}
    known |= set(getattr(config, "auto_map", None) or ())
    if task.auto_class in known:
        return task.auto_class, task.head_settings()
    single = "AutoModelForSequenceClassification"
    if task.auto_class == "AutoModelForMultipleChoice" and single in known:
        return single, {"num_labels": 1}
    raise UserError(
        f"{folder}: Transformers has no {task.auto_class.removeprefix('AutoModel')} of {config.model_type}, which the "
        f"task {task.name} needs; use a model of another family"
    )


def is_of_head(model: PreTrainedModel, name: str) -> bool:
    """Returns whether the weight `name` belongs to the head: it is outside of the base model, or in its pooler. A model
    that is nothing but a base model has no other head than its pooler."""
    is_outside = model.base_model is not model and not name.startswith(f"{model.base_model_prefix}.")
    return is_outside or "pooler" in name.split(".")


def _initialise_head(model: PreTrainedModel, random: Collection[str]) -> None:
    """Makes the weights of a head that was trained before random, as Transformers makes missing ones. `random` are the
    names of those that are random already."""
    trained = [
        (name.split("."), weight)
        for name, weight in model.named_parameters()
        if name not in random and is_of_head(model, name) and not KEPT_LAYERS & set(name.split("."))
    ]
    for parts, weight in trained:
        weight._is_hf_initialized = False
        for depth in range(len(parts)):  # the model, and each module that holds the weight
            model.get_submodule(".".join(parts[:depth]))._is_hf_initialized = False
    if trained:
        model.initialize_weights()


def pad_id(tokenizer: Any, model: PreTrainedModel, folder: Path) -> int:
    """Returns the id that fills up short inputs. Raises UserError if the tokenizer has none."""
    for id in (tokenizer.pad_token_id, model.config.pad_token_id, tokenizer.eos_token_id):
        if isinstance(id, int):
            return id
    raise UserError(f"{folder}: its tokenizer has no token for padding; set pad_token in its tokenizer_config.json")


def longest_input(model: PreTrainedModel, wanted: int | None, *, default: int, shorten: bool = False) -> int:
    """Returns the largest number of tokens of an input: `wanted`, by default `default` or the model's limit.

    Raises:
        UserError: the model does not take `wanted` tokens; with `shorten` its limit is returned instead.
    """
    limit = transformers_folder.longest_input(model)
    if wanted is not None and limit is not None and wanted > limit:
        if shorten:
            return limit
        raise UserError(f"max_length {wanted}: the model takes at most {limit} tokens")
    return wanted or min(default, limit or default)


def write_model(model: PreTrainedModel, source: Path, out: Path) -> None:
    """Writes `model` with the tokenizer of the folder `source` and the digests of all files into the folder `out`."""
    with tempfile.TemporaryDirectory() as tokenizer:
        copy_tokenizer(source, Path(tokenizer))
        with silence_transformers():
            transformers_folder.write(model, Path(tokenizer), out)
    folder_digests.write(out)
