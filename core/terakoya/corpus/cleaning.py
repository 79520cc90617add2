"""The cleaning of a corpus: its steps, and the plan on disk that says which documents they drop or hold out."""

from __future__ import annotations

import importlib.metadata
import json
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from terakoya.corpus.cleaning_steps import VERSION, NearDuplicates, Step, apply_steps
from terakoya.corpus.documents import Block, Document, Reject
from terakoya.corpus.files import Source
from terakoya.errors import UserError

PLAN = "plan.json"
_LINE_BITS = 40


@dataclass(frozen=True)
class Cleaning:
    """Cleaning as part of a corpus: its steps, and the plan that says which documents they leave out.

    Attributes:
        folder: where the plan lies; `terakoya.corpus.cleaning_plan.make_plan` writes it.
        files: all files of the corpus: places in the plan are numbers in this list.
        side: which documents are read: all, or without the ones held out, or those alone.
    """

    steps: tuple[Step, ...]
    folder: Path
    files: tuple[Source, ...]
    side: Literal["all", "train", "held_out"]

    @cached_property
    def settings(self) -> str:
        """What the result depends on beside the files, as JSON."""
        facts: dict[str, Any] = {
            "version": VERSION,
            "steps": [step.model_dump() for step in self.steps],
            "side": self.side,
            "unicode": unicodedata.unidata_version,
        }
        if any(isinstance(step, NearDuplicates) for step in self.steps):
            try:
                facts["datasketch"] = importlib.metadata.version("datasketch")
            except importlib.metadata.PackageNotFoundError as error:
                raise UserError('near_duplicates: needs datasketch: pip install "terakoya[data]"') from error
        return json.dumps(facts)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Documents in all, dropped by each step, held out. UserError if there is no plan."""
        try:
            facts = json.loads((self.folder / PLAN).read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self.folder}: expected the plan of a cleaning, found none; start again") from None
        return {name: int(count) for name, count in facts["counts"].items()}

    @property
    def facts(self) -> dict[str, str | int]:
        """Settings and counts, for the record of what was made from the documents."""
        return {"clean": self.settings, **{f"clean: {name}": count for name, count in self.counts.items()}}

    def document_number(self, file: Source, line: int) -> int:
        """The number of a document in the plan; it grows through the corpus."""
        return self._numbers[str(file)] << _LINE_BITS | line

    def apply(self, block: Block, items: Iterable[Document | Reject]) -> Iterator[Document | Reject]:
        """The documents of `block` that are left, changed by the steps; rejects as they are."""
        first = self.document_number(block.file, block.line)
        dropped = _DocumentNumbers(self.folder / "dropped.u8", first)
        held = _DocumentNumbers(self.folder / "held_out.u8", first)
        for item in items:
            if isinstance(item, Reject):
                yield item
                continue
            place = self.document_number(item.file, item.line)
            if dropped.has(place) or (self.side != "all" and held.has(place) != (self.side == "held_out")):
                continue
            yield replace(item, text=apply_steps(self.steps, item.text))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {str(file): number for number, file in enumerate(self.files)}


class _DocumentNumbers:
    """A sorted list of places on disk, asked in rising order."""

    def __init__(self, file: Path, first: int) -> None:
        empty = not file.stat().st_size
        self._places = np.zeros(0, "<u8") if empty else np.memmap(file, "<u8", "r")
        self._at = int(np.searchsorted(self._places, np.uint64(first)))
        self._next = self._look()

    def has(self, place: int) -> bool:
        """Whether `place` is in the list; never smaller than the one asked before."""
        while self._next < place:
            self._at += 1
            self._next = self._look()
        return self._next == place

    def _look(self) -> int:
        return int(self._places[self._at]) if self._at < len(self._places) else 1 << 64
