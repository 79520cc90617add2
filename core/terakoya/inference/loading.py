"""A finished model: a Transformers folder, an export or a checkpoint, found and loaded for use.

It is loaded as anybody would load it, with Transformers' Auto classes, from this machine alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from terakoya.errors import UserError

MASK = "[MASK]"
DISCRIMINATOR = "ElectraForPreTraining"
"""Transformers' class that says of each token whether it was replaced."""
REPLACED = "replaced"
"""The label that makes a token classifier a discriminator."""


def find_model(folder: Path, text: str = "") -> tuple[Path, bool]:
    """The Transformers folder that `folder` means, and whether its model is a discriminator.

    `folder` is that folder itself, a run (its newest checkpoint), a checkpoint, or what holds `generator/` and
    `discriminator/`: the first for a `text` with a [MASK], the second for any other.

    Raises:
        UserError: there is no model.
    """
    if (folder / "checkpoints").is_dir():
        from terakoya.conversion.export import find_checkpoint

        folder = find_checkpoint(folder)
    if (folder / "manifest.json").is_file():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        part = folder / ("generator" if MASK in text else "discriminator")
        if not (part / "config.json").is_file():
            raise UserError(
                f"{folder}: expected a Transformers folder, found no config.json; `terakoya export` writes one"
            )
        folder = part
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes = config.get("architectures") or ()
    return folder, DISCRIMINATOR in classes or REPLACED in (config.get("label2id") or {})


def own_code(folder: Path) -> list[str]:
    """The files with the model's own code that Transformers would run to load the one in `folder`; none where it knows
    the model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") in CONFIG_MAPPING_NAMES:
        return []
    named = (config.get("auto_map") or {}).values()
    classes = [each for value in named for each in (value if isinstance(value, list) else [value]) if each]
    return sorted({f"{each.rpartition('.')[0]}.py" for each in classes})


def load(auto: Any, folder: Path, *, trust: bool = False, **options: Any) -> tuple[Any, Any]:
    """Model, in evaluation, and tokenizer of the folder `folder`; in a checkpoint the tokenizer lies beside
    the models. Code in it is run only with `trust`. `options`, such as `dtype`, are those of `from_pretrained`.

    Raises:
        UserError: it cannot be loaded, lacks weights, or brings code that is not to be run.
    """
    from transformers import AutoTokenizer

    from terakoya.toolkit.formats import model_folder

    code = own_code(folder)
    if code and not trust:
        raise UserError(
            f"{folder}: Transformers does not have this model; it brings its own code, {', '.join(code)}. Read that "
            "and, if it may run on this machine, say so: --trust-remote-code (in Python: trust_remote_code=True)"
        )
    model_folder.quieten()
    places = [folder, folder.parent / "tokenizer", folder.parent.parent / "tokenizer"]
    home = next((place for place in places if (place / "tokenizer_config.json").is_file()), folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=trust)
        model, info = auto.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust, output_loading_info=True, **options
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"{folder}: cannot be loaded: {error}") from error
    if info["missing_keys"]:
        raise UserError(
            f"{folder}: has no weights for {', '.join(sorted(info['missing_keys'])[:5])}; "
            "what Transformers draws at random in their place says nothing of the model"
        )
    return model.eval(), tokenizer


def longest(model: Any) -> int | None:
    """The most tokens that `model` takes, None where its config does not say."""
    config = model.config
    found: int | None = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if found is not None and table is not None and table.padding_idx is not None:
        found -= table.padding_idx + 1  # RoBERTa's positions begin behind the padding id
    return found
