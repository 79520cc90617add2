"""Word finders, which say where the words of a text are, whatever its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from terakoya.components.base import Component

FindWords = Callable[[Sequence[str]], Sequence[np.ndarray]]
"""Returns the words of each text: (W, 2) int64, the position of a word's first character and the position after its
last one, in characters of the text. Words are in order, do not overlap and have no white space at their ends; white
space between words belongs to none."""


class WordFinder(Component):
    """Finds the words of a text. `terakoya prepare --words NAME` marks the tokens at which they start."""

    def build(self) -> FindWords:
        """Returns a new function that finds words. It belongs to one process. Raises UserError if a library or a
        dictionary is missing."""
        raise NotImplementedError

    def fingerprint(self) -> Mapping[str, str]:
        """Returns hashes and versions of everything, other than the settings, on which the words depend. Raises
        UserError as `build`."""
        raise NotImplementedError
