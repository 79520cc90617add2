"""Further checks of causal models and objectives: no output depends on the tokens that it predicts.

Letters in shapes: B rows, T positions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from terakoya.toolkit.architectures import attention
from terakoya_contract import architecture, objective, toy
from terakoya_contract.batches import difference, make_row
from terakoya_contract.results import Check, CheckFailed


def check_is_causal(case: architecture.ArchitectureCase) -> None:
    """With a causal head, a token changes nothing before it."""
    case.require_head("causal")
    batch = make_row(9, case.length() - 9)
    for position in (4, 9 + 3):  # in the row's first document, and in its second
        changed = dict(batch, input_ids=batch["input_ids"].clone())
        first, last = len(toy.VOCABULARY.special), toy.VOCABULARY.size - 1
        changed["input_ids"][:, position:] = first + last - changed["input_ids"][:, position:]
        before, after = case.hidden(batch), case.hidden(changed)
        error = difference(before[:, :position], after[:, :position])
        if error > architecture.TOLERANCE:
            raise CheckFailed(
                f"hidden states differ by {error:.1g} before the position of a changed token: the model sees what it "
                "has to predict. Pass **attention.causal_arguments(model, batch) to the body (attention_interface), or "
                "a mask from attention.causal_mask (mask_4d)"
            )
        if torch.equal(before[:, position], after[:, position]):
            raise CheckFailed(
                "a changed token changes nothing at its own position either; does the body get input_ids?"
            )


def check_whole_rows(case: architecture.ArchitectureCase) -> None:
    """With a causal head, rows marked as one document each give the same hidden states as with a mask."""
    case.require_head("causal")
    batch = make_row(case.length() - 5, padding=5)
    masked, marked = (case.hidden(each) for each in (batch, {**batch, attention.WHOLE_ROWS: torch.empty(0)}))
    error = difference(masked[:, :-5], marked[:, :-5])
    if error > architecture.TOLERANCE:
        raise CheckFailed(f"hidden states differ by {error:.1g} where the batch has attention.WHOLE_ROWS")


def check_labels_are_unseen(case: objective.ObjectiveCase) -> None:
    """On causal rows, no loss depends on the token to predict: later tokens do not change earlier losses."""
    if case.layout.framing != "causal":
        return
    rows = case.rows
    assert rows.labels is not None
    middle = rows.tokens.shape[1] // 2
    labels = np.where(np.arange(rows.tokens.shape[1]) < middle, rows.labels, -100).astype(np.int32)
    tokens = rows.tokens.copy()
    tokens[:, middle:] = np.roll(tokens[:, middle:], 1, axis=0)
    with torch.no_grad():
        sums, others = (case.forward(replace(rows, tokens=each, labels=labels)) for each in (rows.tokens, tokens))
    for name, term in case.objective.terms().items():
        if term.weight is not None and not torch.allclose(sums[name], others[name], rtol=objective.TOLERANCE):
            raise CheckFailed(
                f"{name} over the first {middle} positions is {sums[name].item():.6g}, with other tokens after them "
                f"{others[name].item():.6g}; rows.labels are already shifted: a position's label is the next token"
            )


ARCHITECTURE: tuple[Check, ...] = (check_is_causal, check_whole_rows)
OBJECTIVE: tuple[Check, ...] = (check_labels_are_unseen,)
