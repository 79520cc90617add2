"""From another program's checkpoint to a Transformers folder, with the tokenizer it was trained with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components import Importer
from terakoya.errors import UserError
from terakoya.plugins.create import made

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json", "config.json", "generation_config.json")
"""What belongs to a model and not to the tokenizer beside it."""


@dataclass(frozen=True)
class Imported:
    """What `import_checkpoint` wrote: the folder, the Transformers class that loads it, its parameters, the pieces of
    its vocabulary and of the tokenizer (None without one)."""

    out: Path
    model: str
    parameters: int
    vocabulary: int
    tokenizer: int | None


def import_checkpoint(
    source: Path,
    out: Path,
    *,
    format: str,
    tokenizer: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Imported:
    """Writes the checkpoint at `source` as a Transformers folder, the new folder `out`.

    Args:
        format: a registered importer's name.
        tokenizer: the folder of the tokenizer it was trained with; it is copied in, its special tokens become the
            model's, and its size is the importer's `vocab_size` where that is a setting and not given.
        settings: the importer's.

    Raises:
        UserError: what the importer raises, a tokenizer with more pieces than the model, or `out` is there already.
    """
    settings = dict(settings or {})
    check_new(out)
    importer: Importer = made("importers", format, settings, where=f"importer {format}")
    loaded = _load_tokenizer(tokenizer) if tokenizer else None
    if loaded is not None and "vocab_size" in type(importer).model_fields and "vocab_size" not in settings:
        sized = {**settings, "vocab_size": _size(loaded)}
        importer = made("importers", format, sized, where=f"importer {format}")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.staging-{os.getpid()}")
    staging.mkdir()
    try:
        importer.read(source, staging)
        facts = _look(staging, out, format, loaded)
        if tokenizer and loaded is not None:
            copy_tokenizer(tokenizer, staging)
            _set_special_tokens(staging, loaded)
        if out.exists():
            out.rmdir()
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return facts


def check_new(out: Path) -> None:
    """UserError if there is anything at `out`, an empty folder apart."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{out}: is there already; choose a new folder or remove it")


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copies the tokenizer's files of the folder `source` into `out`; a model's files beside them stay behind."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in MODEL_FILES):
            shutil.copyfile(file, out / file.name)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise UserError(f"{folder}: expected a tokenizer's folder, found none")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder}: expected a tokenizer that Transformers loads: {reason}") from error


def _size(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many rows of embeddings the tokenizer's ids need."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def _look(folder: Path, out: Path, format: str, tokenizer: PreTrainedTokenizerBase | None) -> Imported:
    """What is in the model folder that an importer wrote. UserError if the tokenizer needs more rows than it has."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            parameters += sum(_count(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    rows = int(config["vocab_size"])
    size = _size(tokenizer) if tokenizer is not None else None
    if size is not None and size > rows:
        raise UserError(
            f"the tokenizer has {size:,} pieces, the checkpoint embeddings for {rows:,}; it was trained with another"
        )
    return Imported(out, next(iter(config.get("architectures") or [format])), parameters, rows, size)


def _count(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _set_special_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the tokenizer's special tokens those of the model's config, so that generating ends where it should."""
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if getattr(tokenizer, key) is not None:
                    content[key] = getattr(tokenizer, key)
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
