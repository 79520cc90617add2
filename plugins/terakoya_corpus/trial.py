"""What each cleaning step of a list would drop, tried on the sample of a survey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terakoya.components import CleaningStep
from terakoya_corpus.counting import DistinctTexts, Sampled
from terakoya_corpus.masking import Mask, excerpt

EXAMPLES = 3


@dataclass
class StepTrial:
    """What a step does to the documents that come to it.

    Attributes:
        documents: how many of the sample come to it, `dropped` how many of these it drops.
        compares: whether it compares documents: of a sample it sees fewer that are alike than there are.
        dropped_examples: file, line, reason and excerpt of some that it drops.
    """

    name: str
    documents: int = 0
    dropped: int = 0
    compares: bool = False
    dropped_examples: list[tuple[str, int, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """What a list of steps does to the sample: of each step, and in the end. `kept` has examples as of a step."""

    steps: Sequence[StepTrial]
    documents: int
    held_out: int
    kept: int
    kept_examples: Sequence[tuple[str, int, str, str]]


def try_steps(steps: Sequence[Any], texts: DistinctTexts, mask: Mask) -> Trial:
    """Returns what `steps`, each with a name and its `step`, drop of the sample of `texts`.

    Of a text that occurs several times, the first is one document and all others are one row after it, which weighs as
    much as they are many: so a step that compares documents sees a copy. Examples are those with the smallest hashes,
    which are random and the same each time.
    """
    sample = list(texts.sample())
    rows: list[tuple[int, int, Sampled]] = []
    for digest, count, each in sample:
        rows += [(digest, 1, each), (digest, count - 1, each)] if count > 1 else [(digest, 1, each)]
    weights = np.array([weight for _, weight, _ in rows], np.int64)
    changed = [each.text for _, _, each in rows]
    left = np.ones(len(rows), bool)
    trials, held_out = [], np.zeros(len(rows), bool)
    for named in steps:
        step: CleaningStep = named.step
        trial = StepTrial(named.name, documents=int(weights[left].sum()), compares=step.note_type is not None)
        drops, reasons = np.zeros(len(rows), bool), {}
        for row in np.flatnonzero(left).tolist():
            changed[row] = step.change(changed[row])
            if not step.keeps(changed[row]):
                drops[row] = True
                reasons[row] = step.why(changed[row])
            elif hasattr(step, "holds_out"):
                held_out[row] = step.holds_out(changed[row])
        left &= ~drops
        if step.note_type is not None and len(rows):
            notes = np.zeros(len(rows), np.dtype([("note", step.note_type)]))["note"]
            for row in np.flatnonzero(left).tolist():
                notes[row] = step.note(changed[row])
            compared = step.drop([notes], left)
            drops[compared] = True
            left[compared] = False
        trial.dropped = int(weights[drops].sum())
        trial.dropped_examples = _examples(rows, drops, mask, reasons)
        if step.drops:
            trials.append(trial)
    kept = left & ~held_out
    return Trial(
        trials,
        int(weights.sum()),
        int(weights[left & held_out].sum()),
        int(weights[kept].sum()),
        _examples(rows, kept, mask, {}),
    )


def _examples(
    rows: Sequence[tuple[int, int, Sampled]], chosen: np.ndarray, mask: Mask, reasons: dict[int, str]
) -> list[tuple[str, int, str, str]]:
    of = {rows[row][0]: row for row in np.flatnonzero(chosen).tolist()}
    found = sorted(of.items())[:EXAMPLES]
    places = [(*rows[row][2].place, row) for _, row in found]
    return [(file, line, reasons.get(row, ""), excerpt(rows[row][2].text, mask)) for file, line, row in places]
