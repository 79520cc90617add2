"""What drops and changes documents of a corpus: `plugins/terakoya_cleaning` has it, as steps and their plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from terakoya.corpus.documents import Block, Document, Reject

StepsOrFile = Path | str | Sequence[Mapping[str, Any]]
"""Cleaning steps as JSON values, or a JSON or YAML file with a list of them."""


class Cleaning(Protocol):
    """The cleaning of a corpus, decided in a plan that all its processes read. It is compared by its settings."""

    @property
    def settings(self) -> str:
        """Everything but the files that the result depends on, as JSON."""

    @property
    def facts(self) -> Mapping[str, str | int]:
        """Settings and counts, to be recorded with what is made from the documents."""

    @property
    def documents(self) -> int:
        """The documents of the whole corpus in its plan, before anything is dropped. Raises UserError if there is no
        plan."""

    def make_plan(self, corpus: Any, *, processes: int, name: str = "") -> object:
        """Reads the `Corpus`, whose cleaning this is, and decides which documents stay, unless that is on disk already.
        `name` is that of one of several corpora. Raises UserError for files that are changed or damaged."""

    def explain_empty(self) -> str | None:
        """Returns why the plan leaves no document of the corpus, and what to do; None if it leaves one."""

    def apply(self, block: Block, items: Iterable[Document | Reject]) -> Iterator[Document | Reject]:
        """Yields the remaining documents of `block`, changed, and the rejects unchanged. Raises UserError if another
        command has replaced the plan."""


AddCleaning = Callable[[Any, Path, bool], Any]
"""Returns a `Corpus` with a `Cleaning` whose plan is in a folder; if True, only the documents that are held out. Reads
no document. Raises UserError for steps that do not fit."""
