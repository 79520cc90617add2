"""Cleaning steps: each sees the documents of a corpus, and keeps, changes or drops them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from terakoya.components.base import Component


class CleaningStep(Component):
    """Changes and drops documents. The steps of the list `clean` follow each other: each gets the text that the one
    before returned, of the documents that all before kept.

    `change` and `keeps` see one text, in any process. What depends on other documents is decided once, in a plan: a
    step with a `note_type` notes something of each text, and `drop` sees the notes of the whole corpus.
    """

    repeats: ClassVar[bool] = False
    """Whether a list may have the step more than once."""
    drops: ClassVar[bool] = True
    """Whether it can drop documents, which are then counted and shown under its name and `reason`."""

    @property
    def reason(self) -> str:
        """What the name of the step does not say about why it drops documents."""
        return ""

    def versions(self) -> Mapping[str, str]:
        """Returns the versions of the libraries, and hashes of the files, on which the result depends. Raises UserError
        if one is missing."""
        return {}

    def change(self, text: str) -> str:
        """Returns the changed text of a document."""
        return text

    def keeps(self, text: str) -> bool:
        """Whether a document stays, as far as its own changed text decides."""
        return True

    def why(self, text: str) -> str:
        """Returns in a few words why `keeps` says no about `text`, where the name of the step and `reason` do not say
        all: a number, a rule, a kind. It is written to a file, and therefore quotes nothing of the text."""
        return ""

    def count(self, text: str) -> Mapping[str, int]:
        """Returns how much of which kind the step finds in a text that comes to it: {"phone": 2}. The plan adds up."""
        return {}

    def show(self, excerpt: str) -> str:
        """Returns a part of any document, before the steps, as examples may show it: without what is secret."""
        return excerpt

    @property
    def note_type(self) -> np.dtype | None:
        """The type of `note`; None for a step that does not compare documents."""
        return None

    def note(self, text: str) -> np.ndarray:
        """Returns what `drop` has to know of a document that stays so far: a value of `note_type`."""
        raise NotImplementedError

    def drop(self, notes: Sequence[np.ndarray], left: np.ndarray) -> np.ndarray:
        """Returns the indices of the documents to drop, (M,) integers.

        notes: those of N documents in the order of the corpus, in parts; of a document that is not `left` it is zero
        or has no meaning. left: (N,) bool, whether a document is there when the step comes.
        """
        raise NotImplementedError
