"""The export format `example`: a Transformers folder, and a list of the SHA-256 of every file in it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya import hookimpl
from terakoya.components import Exporter

if TYPE_CHECKING:  # transformers is imported inside methods, so that the command line stays quick
    from transformers import PreTrainedModel

LIST = "SHA256SUMS"


class Example(Exporter):
    """A Transformers folder with a file `SHA256SUMS`, for `sha256sum --check SHA256SUMS`."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        from terakoya.toolkit.architectures import attention
        from terakoya.toolkit.formats import model_files, model_folder

        for name, model in models.items():
            folder = out / name
            attention.release(model)  # Transformers' own attention again
            model_folder.write(model, folder)
            for file in model_files.tokenizer_files(tokenizer_folder):
                shutil.copyfile(file, folder / file.name)
        files = sorted(path for path in out.rglob("*") if path.is_file())
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(out)}" for file in files]
        (out / LIST).write_text("\n".join(sums) + "\n", encoding="utf-8")


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    """Registers `example`: `terakoya export RUN --out DIR --format example`."""
    return {"example": Example}
