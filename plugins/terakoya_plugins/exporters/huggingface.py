"""The Transformers folder: config, safetensors weights and tokenizer, loadable offline."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya import hookimpl
from terakoya.components import Exporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HuggingFace(Exporter):
    """One folder a model; the tokenizer's files lie in each."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes `models` (by sub-folder, "" is `out` itself)."""
        from terakoya import attention, model_folder

        for name, model in models.items():
            folder = out / name
            attention.release(model)
            model_folder.write(model, folder)
            for file in sorted(tokenizer_folder.iterdir()):
                if file.is_file() and file.name != "config.json":  # the model's own config stands
                    shutil.copyfile(file, folder / file.name)


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    """Offers `huggingface`."""
    return {"huggingface": HuggingFace}
