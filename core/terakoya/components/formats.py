"""Formats of finished models: those that are written, and those of other programs that are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from terakoya.components.base import Component

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Exporter(Component):
    """A format in which finished models are written."""

    one_weight_at_a_time: ClassVar[bool] = False
    """Whether `export` does nothing with a model but to give it to `toolkit.formats.transformers_folder.write`. Models
    may then have no memory for their weights, which are read one at a time."""

    for_transformers: ClassVar[bool] = True
    """Whether the written folder is `models` as Transformers loads them; else its README.md may say how to use it."""

    def check(self) -> None:
        """Raises UserError if this format cannot be written here, for example without its library. It is called before
        the model is loaded."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes `models` (by sub-folder) with their tokenizer into the new folder `out`."""
        raise NotImplementedError

    def compare(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> Sequence[str]:
        """Runs what `export` has written into `out` in the program that it is for. Returns what was compared with
        `models` and `tokenizer_folder`, a sentence each; nothing where Transformers is that program. Raises UserError
        if the program computes something else; `out` is then removed."""
        return ()


class Importer(Component):
    """The checkpoint format of another program."""

    model_classes: ClassVar[frozenset[str]] = frozenset()
    """Classes in the `architectures` of a config.json that Transformers does not have and this importer reads: who
    gives such a folder in the place of a model is told to import it."""

    def read(self, source: Path, out: Path) -> None:
        """Reads the checkpoint at `source` and writes a Transformers folder to `out`, or several below it."""
        raise NotImplementedError
