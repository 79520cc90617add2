"""Converts another program's checkpoint to a Transformers folder, together with its tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.atomic_files import check_new_folder, new_folder
from terakoya.components import Importer
from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, list_models
from terakoya.plugins.create import create_component
from terakoya.toolkit.formats.model_files import tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ImportResult:
    """What `import_checkpoint` wrote.

    Attributes:
        out: the new folder.
        models: sub-folder -> Transformers class that loads the model in it; "" is `out` itself.
        parameter_count: number of the parameters of all models.
        vocabulary_size: number of rows of the embeddings.
        tokenizer_size: number of the tokenizer's pieces; None without a tokenizer.
    """

    out: Path
    models: Mapping[str, str]
    parameter_count: int
    vocabulary_size: int
    tokenizer_size: int | None


def import_checkpoint(
    source: Path | str,
    out: Path | str,
    *,
    format: str,
    tokenizer: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ImportResult:
    """Writes the checkpoint at `source` as the new folder `out`: a Transformers folder, or one for each of its models.
    Raises UserError as the importer does, for a tokenizer with more pieces than the model, and if `out` already exists.

    Args:
        format: a registered importer's name.
        tokenizer: the folder of the tokenizer that the model was trained with. Its files are copied into `out`, its
            special tokens become the model's, and its size is the default of the importer's setting `vocab_size`.
        settings: settings of the importer.
    """
    source, out, settings = Path(source), Path(out), dict(settings or {})
    check_new_folder(out)
    importer: Importer = create_component("importers", format, settings, where=f"importer {format}")
    loaded = _load_tokenizer(Path(tokenizer)) if tokenizer else None
    if loaded is not None and "vocab_size" in type(importer).model_fields and "vocab_size" not in settings:
        settings["vocab_size"] = _tokenizer_size(loaded)
        importer = create_component("importers", format, settings, where=f"importer {format}")
    with new_folder(out) as draft:
        importer.read(source, draft)
        found = {name: _inspect(draft / name, format, loaded) for name in list_models(draft)}
        for name in found:
            if tokenizer and loaded is not None:
                copy_tokenizer(Path(tokenizer), draft / name)
                _set_special_tokens(draft / name, loaded)
    classes, counts, rows = zip(*found.values(), strict=True)
    size = _tokenizer_size(loaded) if loaded is not None else None
    return ImportResult(out, dict(zip(found, classes, strict=True)), sum(counts), rows[0], size)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copies the tokenizer's files of the folder `source` into `out`, but none of a model's files."""
    for file in tokenizer_files(source):
        shutil.copyfile(file, out / file.name)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a tokenizer's folder, got {describe_found(folder, 'tokenizer')}")
    return load_tokenizer(folder)


def _tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of embedding rows that the tokenizer's ids need."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def _inspect(folder: Path, format: str, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, int, int]:
    """Returns the class of the model in `folder`, which an importer wrote, its parameters, and its embedding rows.
    Raises UserError if the tokenizer needs more embedding rows than the model has."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameter_count = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            parameter_count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    rows = int(config["vocab_size"])
    if tokenizer is not None and (size := _tokenizer_size(tokenizer)) > rows:
        raise UserError(
            f"the tokenizer has {size:,} pieces, but the checkpoint has embeddings for {rows:,}; "
            "the model was trained with another tokenizer"
        )
    return next(iter(config.get("architectures") or [format])), parameter_count, rows


def _set_special_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the tokenizer's special tokens into the model's config, so that generation ends at the right token."""
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if getattr(tokenizer, key) is not None:
                    content[key] = getattr(tokenizer, key)
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
