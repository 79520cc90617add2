"""Checks of an initializer: its weights make every row a mean of old rows, the same ones each time."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from terakoya.components import Initializer, VocabularyChange
from terakoya.components.tokenizer import load_tokenizer
from terakoya_contract import toy
from terakoya_contract.results import Check, CheckFailed
from terakoya_contract.settings import Case

WORDS = ("[UNK]", "a", "b", "##a", "##b", "ab", "東", "京", "##京")
NEW_WORDS = (*WORDS, "aba", "##ab", "東京", "鯨", "[MASK]")
"""A piece of known ones, one inside a word, one of two characters, one of an unknown character, and a special one."""


def _change(folder: Path) -> VocabularyChange:
    for name, words in (("old", WORDS), ("new", NEW_WORDS)):
        toy.make_wordpiece(folder / name, words)
    old, new = (load_tokenizer(folder / name) for name in ("old", "new"))
    kept = {id: id for id in range(len(WORDS))}
    return VocabularyChange(old=old, new=new, kept=kept, missing=range(len(WORDS), len(NEW_WORDS)))


def check_weights(case: Case) -> None:
    """Every new row is a mean of old rows, and the same one when it is made again."""
    initializer = case.settings_of(Initializer)
    with tempfile.TemporaryDirectory() as home:
        change = _change(Path(home))
        first, second = initializer.weights(change), initializer.weights(change)
    if len(first) != len(change.missing):
        raise CheckFailed(f"weights returned {len(first)} mappings, expected one for each of {len(change.missing)} ids")
    for id, row in zip(change.missing, first, strict=True):
        piece = NEW_WORDS[id]
        outside = [each for each in row if each not in range(len(WORDS))]
        if outside:
            raise CheckFailed(f"for {piece!r} it weighs id {outside[0]}, which the old vocabulary does not have")
        if any(not math.isfinite(weight) or weight <= 0 for weight in row.values()):
            raise CheckFailed(f"for {piece!r} its weights are {dict(row)}, expected positive numbers")
        if sum(row.values()) > 1 + 1e-6:
            raise CheckFailed(f"for {piece!r} its weights have the sum {sum(row.values()):.6g}, expected at most 1")
    if list(map(dict, first)) != list(map(dict, second)):
        raise CheckFailed("called again for the same change it returns other weights; seed what is random")


CHECKS: tuple[Check, ...] = (check_weights,)
