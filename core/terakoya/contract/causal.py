"""What causal models and their objectives promise beside what others do: nobody sees what is to be predicted.

Letters in shapes: B rows, T positions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from terakoya.contract import architecture, objective, toy
from terakoya.contract.batches import difference, row
from terakoya.contract.findings import Check, NotLookedAt, Wrong
from terakoya.toolkit.architectures import attention


def sees_nothing_ahead(subject: architecture.Subject) -> None:
    """With a causal head, a token changes nothing before it."""
    if not _causal(subject):
        return
    batch = row(9, subject.length() - 9)
    for place in (4, 9 + 3):  # in the row's first document, and in its second
        changed = dict(batch, input_ids=batch["input_ids"].clone())
        first, last = len(toy.VOCABULARY.special), toy.VOCABULARY.size - 1
        changed["input_ids"][:, place:] = first + last - changed["input_ids"][:, place:]
        before, after = subject.hidden(batch), subject.hidden(changed)
        found = difference(before[:, :place], after[:, :place])
        if found > architecture.TOLERANCE:
            raise Wrong(
                f"hidden states differ by {found:.1g} before the place where tokens were changed: the model sees what "
                "it is to predict. Hand **attention.causal_arguments(model, batch) to the body (interface), or a mask "
                "made of attention.causal_mask (mask4d)"
            )
        if torch.equal(before[:, place], after[:, place]):
            raise Wrong("a changed token changes nothing at its own place either; does the body get input_ids?")


def whole_rows(subject: architecture.Subject) -> None:
    """With a causal head, rows that are said to be one document each give what a mask would give."""
    if not _causal(subject):
        return
    batch = row(subject.length() - 5, padding=5)
    masked, said = (subject.hidden(each) for each in (batch, {**batch, attention.WHOLE_ROWS: torch.empty(0)}))
    found = difference(masked[:, :-5], said[:, :-5])
    if found > architecture.TOLERANCE:
        raise Wrong(f"hidden states differ by {found:.1g} where the batch has attention.WHOLE_ROWS")


def predicts_unseen(subject: objective.Subject) -> None:
    """Of causal rows, no loss knows the token that it asks for: later tokens leave earlier losses as they are."""
    if subject.layout.framing != "causal":
        return
    rows = subject.rows
    assert rows.labels is not None
    middle = rows.tokens.shape[1] // 2
    labels = np.where(np.arange(rows.tokens.shape[1]) < middle, rows.labels, -100).astype(np.int32)
    tokens = rows.tokens.copy()
    tokens[:, middle:] = np.roll(tokens[:, middle:], 1, axis=0)
    with torch.no_grad():
        sums, others = (subject.forward(replace(rows, tokens=each, labels=labels)) for each in (rows.tokens, tokens))
    for name, term in subject.objective.terms().items():
        if term.weight is not None and not torch.allclose(sums[name], others[name], rtol=objective.TOLERANCE):
            raise Wrong(
                f"{name} over the first {middle} places is {sums[name].item():.6g}, with other tokens behind them "
                f"{others[name].item():.6g}; rows.labels are shifted already: the label of a place is the next token"
            )


def _causal(subject: architecture.Subject) -> bool:
    """Whether the subject has a causal head. Raises NotLookedAt where its model here is for another."""
    if "causal" not in subject.architecture.heads:
        return False
    if subject.head != "causal":
        raise NotLookedAt(f"its hidden states are looked at with the head {subject.head!r}")
    return True


ARCHITECTURE: tuple[Check, ...] = (sees_nothing_ahead, whole_rows)
OBJECTIVE: tuple[Check, ...] = (predicts_unseen,)
