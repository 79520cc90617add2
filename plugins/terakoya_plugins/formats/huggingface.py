"""Exports a Transformers folder with config, safetensors weights and tokenizer, which loads offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya import hookimpl
from terakoya.components import Exporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HuggingFace(Exporter):
    """One folder per model, with the tokenizer's files in each."""

    one_weight_at_a_time = True

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        from terakoya.toolkit.formats import transformers_folder

        for name, model in models.items():
            transformers_folder.write(model, tokenizer_folder, out / name)


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    return {"huggingface": HuggingFace}
