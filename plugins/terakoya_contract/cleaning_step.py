"""Checks of a cleaning step: it decides the same about a text each time, and compares documents by their notes."""

from __future__ import annotations

import numpy as np

from terakoya.components import CleaningStep
from terakoya_contract.results import Check, CheckFailed, CheckSkipped
from terakoya_contract.settings import Case
from terakoya_contract.word_finder import TEXTS

_TWICE = (*TEXTS, *TEXTS)


def check_texts(case: Case) -> None:
    """It changes a text to a text and says whether it stays, the same each time and in every process."""
    one, other = case.settings_of(CleaningStep), case.settings_of(CleaningStep)
    for text in TEXTS:
        changed = one.change(text)
        if not isinstance(changed, str):
            raise CheckFailed(f"change({text!r}) returned {type(changed).__name__}, expected a text")
        kept = one.keeps(changed)
        if not isinstance(kept, bool | np.bool_):
            raise CheckFailed(f"keeps({changed!r}) returned {kept!r}, expected True or False")
        if (changed, kept) != (other.change(text), other.keeps(changed)):
            raise CheckFailed(f"another step with these settings decides otherwise about {text!r}")
        if not kept and not one.drops:
            raise CheckFailed(f"it drops {changed!r}, but sets drops = False: what is dropped is counted")
        if not isinstance(one.show(text), str) or not all(isinstance(each, int) for each in one.count(text).values()):
            raise CheckFailed(f"show({text!r}) or count({text!r}) returned no text, or no numbers by kind")
        if not kept and not isinstance(why := one.why(changed), str):
            raise CheckFailed(f"why({changed!r}) returned {type(why).__name__}, expected a text")


def check_notes(case: Case) -> None:
    """Documents that it drops by their notes are some of those that are left, in whatever parts the notes come."""
    step = case.settings_of(CleaningStep)
    if step.note_type is None:
        raise CheckSkipped("it does not compare documents")
    notes = np.zeros(len(_TWICE), np.dtype([("note", step.note_type)]))["note"]
    for number, text in enumerate(_TWICE):
        notes[number] = step.note(step.change(text))
    left = np.arange(len(_TWICE)) % 5 != 1
    dropped = np.sort(np.asarray(step.drop([notes], left)))
    if dropped.ndim != 1 or not np.issubdtype(dropped.dtype, np.integer):
        raise CheckFailed(f"drop returned {dropped.dtype} {dropped.shape}, expected the indices of documents, (M,)")
    if not np.isin(dropped, np.flatnonzero(left)).all():
        raise CheckFailed("drop returned documents that are not left, or that do not exist")
    if not np.array_equal(dropped, np.sort(step.drop([notes[:5], notes[5:5], notes[5:]], left))):
        raise CheckFailed("drop returned other documents where the same notes come in other parts")


CHECKS: tuple[Check, ...] = (check_texts, check_notes)
