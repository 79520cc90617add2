"""The import format `example`: PyTorch weights with the names of the first BERT, and a config.json."""

from __future__ import annotations

from pathlib import Path

from terakoya import hookimpl
from terakoya.components import Importer
from terakoya.errors import UserError

RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Endings of names: in this format -> in Transformers."""


class Example(Importer):
    """Reads `pytorch_model.bin` and `config.json`."""

    def read(self, source: Path, out: Path) -> None:
        import torch
        from terakoya.toolkit.formats import model_folder
        from transformers import AutoConfig, AutoModelForMaskedLM

        file = source / "pytorch_model.bin"
        if not file.is_file():
            raise UserError(f"{source}: expected a folder with pytorch_model.bin, found none")
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        model = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
        weights = torch.load(
            file, map_location="cpu", weights_only=True
        )  # unpickles tensors only, never unknown objects
        for old, new in RENAMED.items():
            weights = {name.replace(old, new): value for name, value in weights.items()}
        report = model.load_state_dict(weights, strict=False)
        if report.missing_keys or report.unexpected_keys:
            raise UserError(f"{file}: lacks {report.missing_keys}, has unknown {report.unexpected_keys}")
        model_folder.write(model, out)


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    return {"example": Example}
