"""The Transformers folder: config, safetensors weights and tokenizer, loadable offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya import hookimpl
from terakoya.components import Exporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CODE = """import transformers


class {name}(transformers.{name}):
    \"\"\"Transformers' own, under the name by which AutoTokenizer finds it beside any model.\"\"\"
"""


class HuggingFace(Exporter):
    """One folder a model; the tokenizer's files lie in each."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes `models` (by sub-folder, "" is `out` itself)."""
        from terakoya.toolkit.architectures import attention
        from terakoya.toolkit.formats import model_folder

        for name, model in models.items():
            folder = out / name
            attention.release(model)
            model_folder.write(model, folder)
            for file in sorted(tokenizer_folder.iterdir()):
                if file.is_file() and file.name != "config.json":  # the model's own config stands
                    shutil.copyfile(file, folder / file.name)
            _fit_tokenizer(model, folder, tokenizer_folder)


def _fit_tokenizer(model: PreTrainedModel, folder: Path, original: Path) -> None:
    """Makes AutoTokenizer load in `folder` the class that it loads in `original`, giving what `model` takes.

    Beside some models, ModernBERT for one, it passes over the class that tokenizer_config.json names, unless that comes
    by way of `auto_map`; what this names is that class again. Models without token types are given none.

    Beside a model with code of its own that code is run, as whoever loads the folder does: it is the plugin's, which
    has just trained the model.
    """
    tokenizer = _loaded(original)
    if tokenizer is None:
        return
    kind, changes = type(tokenizer), dict[str, Any]()
    if kind.__module__.startswith("transformers.") and type(_loaded(folder, trust=True)) is not kind:
        changes["auto_map"] = {"AutoTokenizer": [f"tokenization.{kind.__name__}", None]}
        (folder / "tokenization.py").write_text(CODE.format(name=kind.__name__), encoding="utf-8")
    names = tokenizer.model_input_names
    # A GPT-2 takes token types for words that it adds to each of its own; other decoders refuse them.
    untyped = model.can_generate() or getattr(model.config, "type_vocab_size", 2) < 2
    if untyped and "token_type_ids" in names:
        changes["model_input_names"] = [name for name in names if name != "token_type_ids"]
    if changes:
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _loaded(folder: Path, *, trust: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer that AutoTokenizer loads in `folder`, None if it loads none. Its code is run only with `trust`."""
    from transformers import AutoTokenizer

    try:
        # said either way: left open, Transformers asks the terminal
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except (ValueError, OSError, ImportError):
        return None


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    """Offers `huggingface`."""
    return {"huggingface": HuggingFace}
