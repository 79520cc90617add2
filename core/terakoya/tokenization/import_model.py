"""Imports a tokenizer's model that another program trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from terakoya.atomic_files import new_folder
from terakoya.errors import UserError
from terakoya.folder_kinds import missing_file, refuse_pointers
from terakoya.tokenization.train import make_tokenizer, record_kind


@runtime_checkable
class ModelImporter(Protocol):
    """A kind of tokenizer that can import a model trained by another program."""

    def import_file(self, file: Path, folder: Path) -> Mapping[str, Any]:
        """Writes `folder` from the model `file`; returns facts for the record."""


def import_tokenizer(model: Path, out: Path, *, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Writes the trained model in the file `model` as the new folder `out`, which Transformers loads. `settings` are
    `type`, the kind of tokenizer, and the settings of that kind. Returns facts about the tokenizer. Raises UserError
    for wrong settings, a kind that has no model files, no such file or a pointer of Git LFS, or if `out` exists and is
    not empty; and as the kind does."""
    kind = make_tokenizer(settings)
    if not isinstance(kind, ModelImporter):
        advice = "a tokenizer of Transformers is used as it is, by its folder"
        if ".json" in model.suffixes:
            advice = f"put {model}, unpacked, into a folder of its own as tokenizer.json, and use that folder"
        raise UserError(f"--type {settings['type']}: this kind has no model files to import: {advice}")
    if not model.is_file():
        raise UserError(f"{model}: {missing_file(model)}")
    refuse_pointers([model])
    with new_folder(Path(out)) as folder:
        facts = kind.import_file(model, folder)
        record_kind(folder, settings["type"], kind)
        return facts
