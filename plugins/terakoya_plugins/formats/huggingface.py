"""Exports a Transformers folder with config, safetensors weights and tokenizer, which loads offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from terakoya import hookimpl
from terakoya.components import Exporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HuggingFace(Exporter):
    """One folder per model, with the tokenizer's files in each."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of the weights in the files. Those of a run are float32, and are rounded."""

    @property
    def one_weight_at_a_time(self) -> bool:  # type: ignore[override]
        return self.dtype == "float32"

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        import torch

        from terakoya.toolkit.formats import transformers_folder

        for name, model in models.items():
            if self.dtype != "float32":
                model.to(getattr(torch, self.dtype))
            transformers_folder.write(model, tokenizer_folder, out / name)


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    return {"huggingface": HuggingFace}
