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
from terakoya.hub.card_evaluation import SCORES
from terakoya.json_settings import read_json


def write_scores(folder: Path, source: Path, finetuned: Mapping[str, Any], *, settings: Mapping[str, Any]) -> None:
    """Writes the scores of the model `source` into its folder `folder`, in the form of `terakoya evaluate --out`.
    Scores of other tasks that are there stay.

    Args:
        finetuned: the name of a task or of a file -> its result as JSON.
    """
    file = folder / SCORES
    before: Mapping[str, Any] = {}
    if file.is_file():
        try:
            before = read_json(file)["finetuned"]
        except (UserError, KeyError) as error:
            raise UserError(f"{file}: expected scores that terakoya wrote: {error}; remove it") from None
    content = {
        "model": source.resolve().name,
        "measure": "fine-tuning",
        "settings": {**settings, **versions()},
        "results": [],
        "tasks": {},
        "finetuned": {**before, **finetuned},
    }
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that decide the scores."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}
