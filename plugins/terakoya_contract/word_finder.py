"""Checks of a word finder: its words are parts of the text, in order, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from terakoya.components import WordFinder
from terakoya_contract.results import Check, CheckFailed
from terakoya_contract.settings import Case
from terakoya_contract.tokenizer import LINES, UNSEEN

TEXTS = (*LINES, *UNSEEN, "\n".join(LINES), " \n\n 寺子屋　では、 two  spaces\n", "ｶﾞｷﾞ㌔㍿。\0 後")


def check_spans(case: Case) -> None:
    """Its words are in the text and in order, do not overlap, and have no white space at their ends."""
    found = case.settings_of(WordFinder).build()(TEXTS)
    if len(found) != len(TEXTS):
        raise CheckFailed(f"it returned {len(found)} arrays for {len(TEXTS)} texts; return one for each")
    for text, words in zip(TEXTS, found, strict=True):
        if not isinstance(words, np.ndarray) or words.dtype != np.int64 or words.ndim != 2 or words.shape[1] != 2:
            raise CheckFailed(f"for {text!r} it returned {_describe(words)}, expected an int64 array of shape (W, 2)")
        for start, stop in words.tolist():
            if not 0 <= start < stop <= len(text):
                raise CheckFailed(f"for {text!r} a word is from {start} to {stop}, expected a part of the text")
            if text[start:stop] != text[start:stop].strip():
                raise CheckFailed(
                    f"for {text!r} the word {text[start:stop]!r} has white space at its ends; leave it out"
                )
        if np.any(np.diff(words[:, 0]) < 0) or np.any(np.diff(words[:, 1]) < 0):
            raise CheckFailed(f"for {text!r} the words are not in order")


def _describe(words: object) -> str:
    return f"{words.shape} {words.dtype}" if isinstance(words, np.ndarray) else type(words).__name__


def check_independence(case: Case) -> None:
    """The words of a text do not depend on the texts beside it, and are the same each time."""
    find, other = (case.settings_of(WordFinder).build() for _ in range(2))
    together = find(TEXTS)
    if not _same(together, other(TEXTS)):
        raise CheckFailed("a second function that it builds finds other words in the same texts")
    if not _same(together, [find([text])[0] for text in TEXTS]):
        raise CheckFailed("a text alone has other words than beside other texts")


def _same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(one, two) for one, two in zip(left, right, strict=True))


def check_fingerprint(case: Case) -> None:
    """Its fingerprint is a mapping of name to hash or version, the same each time."""
    finder = case.settings_of(WordFinder)
    facts = finder.fingerprint()
    if not facts or not all(isinstance(value, str) for value in facts.values()):
        raise CheckFailed(f"fingerprint returned {facts!r}, expected a mapping of name to hash or version")
    if facts != finder.fingerprint():
        raise CheckFailed("fingerprint returns other values each time; leave out times and addresses")


CHECKS: tuple[Check, ...] = (check_spans, check_independence, check_fingerprint)
