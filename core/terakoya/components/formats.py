"""Formats of finished models: what is written, and what is read of other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from terakoya.components.base import Component
from terakoya.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Exporter(Component):
    """A format that finished models are written in."""

    for_transformers: ClassVar[bool] = True
    """Whether Transformers loads what is written."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes `models` (by sub-folder) with their tokenizer into the new folder `out`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ForeignParameters:
    """What another program's command line asks for, in the words of the parameter JSON.

    Attributes:
        parameters: the JSON, as far as it has a place for what was asked for.
        became: option -> the key, or keys, that it became.
        dropped: option -> why nothing is lost without it.
        unplaced: option -> what it asks for that has no place.
        notes: what else the reader should know, a sentence each.
    """

    parameters: Mapping[str, Any]
    became: Mapping[str, str]
    dropped: Mapping[str, str]
    unplaced: Mapping[str, str]
    notes: Sequence[str] = ()


class Importer(Component):
    """A foreign checkpoint format."""

    def read(self, source: Path, out: Path) -> None:
        """Reads the checkpoint at `source` and writes a Transformers folder to `out`."""
        raise NotImplementedError

    def parameters(self, file: Path) -> ForeignParameters:
        """The run that the script `file` of the same program starts; for formats whose programs are started so.

        Raises:
            UserError: the program has none, or the script starts no run.
        """
        raise UserError(f"importer {type(self).__name__}: reads checkpoints, no scripts")
