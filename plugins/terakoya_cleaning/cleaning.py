"""The cleaning of a corpus: its steps, and the plan on disk that says which documents they drop or hold out."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from terakoya.corpus.documents import Block, Document, Reject
from terakoya.corpus.files import Source
from terakoya.errors import UserError
from terakoya_cleaning.reading import NamedStep, apply_steps
from terakoya_cleaning.steps import HoldOut

VERSION = 1
"""Raise this number when a step changes its meaning, so that earlier cleanings are done again."""

PLAN = "plan.json"
_LINE_BITS = 40


@dataclass(frozen=True)
class Cleaning:
    """The cleaning of a corpus: its steps, and the plan that says which documents they drop; as it is read.

    Attributes:
        folder: holds the plan, which `make_plan` writes.
        files: all files of the corpus; document numbers in the plan contain the index in this list.
        side: which documents are read: all, all but the held-out ones, or only the held-out ones.
        key: of the plan in `folder` that was made or found, "" before; only this plan is read.
    """

    steps: tuple[NamedStep, ...]
    folder: Path
    files: tuple[Source, ...]
    side: Literal["all", "train", "held_out"]
    key: str = field(default="", compare=False, repr=False)

    @cached_property
    def settings(self) -> str:
        """Everything but the files that the result depends on, as JSON."""
        facts: dict[str, Any] = {
            "version": VERSION,
            "steps": [{"type": each.type, **json.loads(each.settings)} for each in self.steps],
            "side": self.side,
            "unicode": unicodedata.unidata_version,
        }
        for each in self.steps:
            facts.update(each.step.versions())
        return json.dumps(facts)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of documents in total, dropped by each step, and held out. Raises UserError if there is no plan, or
        another one than `key` says."""
        return {name: int(count) for name, count in self._read_plan()["counts"].items()}

    @property
    def documents(self) -> int:
        """The documents of the whole corpus, before anything is dropped. Raises UserError if there is no plan."""
        return self.counts["documents"]

    @property
    def facts(self) -> dict[str, str | int]:
        """Settings and counts, to be recorded with what is made from the documents."""
        return {"clean": self.settings, **{f"clean: {name}": count for name, count in self.counts.items()}}

    def explain_empty(self) -> str | None:
        """Returns why no document of the corpus is on this `side`, and what to do. None if there is one, or if the
        corpus has none before the steps. Raises UserError if there is no plan."""
        counts = self.counts
        held_out = counts.get("held out", 0)
        left = held_out + counts["kept"]
        if not counts["documents"] or (held_out if self.side == "held_out" else counts["kept"]):
            return None
        if not left:
            return f"the cleaning steps drop all {counts['documents']:,}; change the steps"
        step = self.steps[-1].step
        assert isinstance(step, HoldOut), "nothing else takes documents to the other side"
        remedy = (
            "change its share or seed, or leave it out and set data.split"
            if left > 1
            else "give more documents, or leave it out"
        )
        return (
            f"hold_out with share {step.share:g} and seed {step.seed} takes {held_out:,} of {left:,} documents; "
            f"{remedy}"
        )

    def document_number(self, file: Source, line: int) -> int:
        """Returns the number of a document in the plan; numbers increase through the corpus."""
        return self._file_indices[str(file)] << _LINE_BITS | line

    def file_and_line(self, number: int) -> tuple[Source, int]:
        """Returns the file and the line of the document that has `number`."""
        return self.files[number >> _LINE_BITS], line_of(number)

    def apply(self, block: Block, items: Iterable[Document | Reject]) -> Iterator[Document | Reject]:
        """Yields the remaining documents of `block`, changed by the steps, and the rejects unchanged.

        Raises UserError if another command has replaced the plan.
        """
        first = self.document_number(block.file, block.line)
        dropped = _DocumentNumbers(self.folder / "dropped.u8", first)
        held_out = _DocumentNumbers(self.folder / "held_out.u8", first)
        if self.key:
            self._read_plan()  # a new plan removes plan.json before it writes the other files: these are of this plan
        for item in items:
            if isinstance(item, Reject):
                yield item
                continue
            number = self.document_number(item.file, item.line)
            if dropped.has(number) or (self.side != "all" and held_out.has(number) != (self.side == "held_out")):
                continue
            yield replace(item, text=apply_steps(self.steps, item.text))

    def remember_plan(self, key: str) -> None:
        """Takes the plan with `key`, which is in `folder`, as the one to read."""
        object.__setattr__(self, "key", key)

    def _read_plan(self) -> Mapping[str, Any]:
        try:
            plan: Mapping[str, Any] = json.loads((self.folder / PLAN).read_bytes())
        except FileNotFoundError:
            if not self.key:
                raise UserError(f"{self.folder}: expected a cleaning plan, found none; start again") from None
            plan = {"key": ""}
        if self.key and plan["key"] != self.key:
            raise UserError(
                f"{self.folder}: the cleaning plan was replaced by another command while it was in use; give each its "
                "own --clean-folder and start again"
            )
        return plan

    @cached_property
    def _file_indices(self) -> dict[str, int]:
        return {str(file): index for index, file in enumerate(self.files)}


def line_of(number: int) -> int:
    """Returns the line of the document that has `number` in its file."""
    return number & (1 << _LINE_BITS) - 1


class _DocumentNumbers:
    """A sorted list of document numbers on disk, searched in increasing order."""

    def __init__(self, file: Path, first: int) -> None:
        empty = not file.stat().st_size
        self._numbers = np.zeros(0, "<u8") if empty else np.memmap(file, "<u8", "r")
        self._index = int(np.searchsorted(self._numbers, np.uint64(first)))
        self._next = self._current()

    def has(self, number: int) -> bool:
        """Whether `number` is in the list. It must not be smaller than in the previous call."""
        while self._next < number:
            self._index += 1
            self._next = self._current()
        return self._next == number

    def _current(self) -> int:
        return int(self._numbers[self._index]) if self._index < len(self._numbers) else 1 << 64
