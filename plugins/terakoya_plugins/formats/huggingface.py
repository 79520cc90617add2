"""Exports a Transformers folder with config, safetensors weights and tokenizer, which loads offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya import hookimpl
from terakoya.components import Exporter
from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CODE = """import transformers


class {name}(transformers.{name}):
    \"\"\"The class of Transformers, under a name by which AutoTokenizer finds it for any model.\"\"\"
"""


class HuggingFace(Exporter):
    """One folder per model, with the tokenizer's files in each."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes `models` (sub-folder -> model; "" is `out` itself) with the tokenizer."""
        from terakoya.toolkit.architectures import attention
        from terakoya.toolkit.formats import model_folder

        for name, model in models.items():
            folder = out / name
            attention.release(model)
            model_folder.write(model, folder)
            for file in sorted(tokenizer_folder.iterdir()):
                if file.is_file() and file.name != "config.json":  # keeps the model's config
                    shutil.copyfile(file, folder / file.name)
            _fit_tokenizer(model, folder, tokenizer_folder)


def _fit_tokenizer(model: PreTrainedModel, folder: Path, original: Path) -> None:
    """Makes AutoTokenizer load the same class from `folder` as from `original`, with the inputs that `model` accepts:
    `truncation=True` cuts texts to its positions.

    For some models, such as ModernBERT, AutoTokenizer ignores the class that tokenizer_config.json names, unless
    `auto_map` names it; so `auto_map` then names the same class. Models without token types get no token types.

    If the model has code of its own, this runs it. The code is that of the plugin which has just trained the model.
    """
    tokenizer = _load_tokenizer(original)
    if tokenizer is None:
        return
    tokenizer_class, changes = type(tokenizer), dict[str, Any]()
    is_builtin = tokenizer_class.__module__.startswith("transformers.")
    if is_builtin and type(_load_tokenizer(folder, trust=True)) is not tokenizer_class:
        changes["auto_map"] = {"AutoTokenizer": [f"tokenization.{tokenizer_class.__name__}", None]}
        (folder / "tokenization.py").write_text(CODE.format(name=tokenizer_class.__name__), encoding="utf-8")
    names = tokenizer.model_input_names
    # A GPT-2 would look token types up in its word embeddings and add them; other decoders do not accept them.
    has_no_types = model.can_generate() or getattr(model.config, "type_vocab_size", 2) < 2
    if has_no_types and "token_type_ids" in names:
        changes["model_input_names"] = [name for name in names if name != "token_type_ids"]
    longest = _longest_input(model)
    if longest is not None and longest < tokenizer.model_max_length:
        changes["model_max_length"] = longest
    if changes:
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _longest_input(model: PreTrainedModel) -> int | None:
    """The tokens that `model` has positions for; None if its positions are relative alone, as DeBERTa's may be."""
    if getattr(model.config, "relative_attention", False) and not model.config.position_biased_input:
        return None
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if positions is not None and getattr(table, "padding_idx", None) is not None:  # RoBERTa counts from padding + 1
        positions -= table.padding_idx + 1  # type: ignore[union-attr]
    return positions


def _load_tokenizer(folder: Path, *, trust: bool = False) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer of `folder` with AutoTokenizer; None if that fails. `trust` allows running its code."""
    try:
        return load_tokenizer(folder, trust_remote_code=trust)
    except UserError:
        return None


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    """Registers `huggingface`."""
    return {"huggingface": HuggingFace}
