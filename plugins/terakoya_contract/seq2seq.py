"""Further checks of encoder-decoders: the decoder sees all of its source, and only earlier tokens of its target.

Letters in shapes: S positions of the decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terakoya_contract import architecture, batches, toy
from terakoya_contract.results import Check, CheckFailed


def check_decoder_is_causal(case: architecture.ArchitectureCase) -> None:
    """With a seq2seq head, a target token changes nothing before it."""
    case.require_head("seq2seq")
    batch = case.row(case.length())
    position = batch["decoder_input_ids"].shape[1] // 2
    changed = {**batch, "decoder_input_ids": _replace_ids(batch["decoder_input_ids"], slice(position, None))}
    before, after = case.hidden(batch), case.hidden(changed)
    error = batches.difference(before[:, :position], after[:, :position])
    if error > architecture.TOLERANCE:
        raise CheckFailed(
            f"the decoder's hidden states differ by {error:.1g} before the position of a changed input: the decoder "
            "sees what it has to predict. Pass it a mask from attention.causal_mask(batch['decoder_document_ids'])"
        )
    if torch.equal(before[:, position], after[:, position]):
        raise CheckFailed(
            "a changed token changes nothing at its own position either; does the decoder get decoder_input_ids?"
        )


def check_decoder_reads_source(case: architecture.ArchitectureCase) -> None:
    """With a seq2seq head, every target token sees the whole source of its document, and no other source."""
    case.require_head("seq2seq")
    first = 9 if case.architecture.document_masking != "none" else case.length()
    further = (case.length() - first,) if first < case.length() else ()
    batch = case.row(first, *further)
    documents, hidden = batch["decoder_document_ids"][0], case.hidden(batch)
    for position in (0, first - 1):
        changed = {**batch, "input_ids": _replace_ids(batch["input_ids"], slice(position, position + 1))}
        moved = (case.hidden(changed) - hidden).abs().amax(-1)[0] > 0
        if not bool(moved[documents == 0].all()):
            raise CheckFailed(
                f"a changed token at position {position} of the source does not change all hidden states of its "
                "target; does the decoder get the encoder's hidden states with a mask for all of them: "
                "attention.document_mask(target, source)?"
            )
        if bool(moved[documents != 0].any()):
            raise CheckFailed(
                "a changed token of one document's source changes the target of another in the row; pass the decoder "
                "attention.document_mask(target, source) for the encoder's hidden states"
            )


def _replace_ids(ids: Tensor, where: slice) -> Tensor:
    """`ids` (1, S) with other ids at `where`, never special ones."""
    first = len(toy.VOCABULARY.special)
    changed = ids.clone()
    changed[:, where] = first + (changed[:, where] - first + 1) % (toy.VOCABULARY.size - first)
    return changed


CHECKS: tuple[Check, ...] = (check_decoder_is_causal, check_decoder_reads_source)
