"""The file of a model's folder with what was measured of it, which `upload` puts on the card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from terakoya.atomic_files import write_text
from terakoya.errors import UserError
from terakoya.json_settings import read_json
from terakoya.toolkit.formats.model_files import SCORES


def write_scores(folder: Path, source: Path, finetuned: Mapping[str, Any], *, settings: Mapping[str, Any]) -> None:
    """Writes the scores of the model `source` into its folder `folder`, in the form of `terakoya evaluate --out`.
    Scores of other tasks that are there stay.

    Args:
        finetuned: the name of a task or of a file -> its result as JSON.
    """
    content = {
        "model": source.resolve().name,
        "measure": "fine-tuning",
        "settings": {**settings, **versions()},
        "results": [],
        "tasks": {},
        "finetuned": {**read_scores(folder), **finetuned},
    }
    write_text(folder / SCORES, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_scores(folder: Path) -> Mapping[str, Any]:
    """Returns the results of tasks that the folder of a model has, by name; none where it has no such file. Raises
    UserError for a file of another form."""
    file = folder / SCORES
    try:
        found: Mapping[str, Any] = read_json(file)["finetuned"] if file.is_file() else {}
    except (UserError, KeyError) as error:
        raise UserError(f"{file}: expected scores that terakoya wrote: {error}; remove it") from None
    return found


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that decide the scores."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}
