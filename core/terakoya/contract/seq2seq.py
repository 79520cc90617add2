"""What encoder-decoders promise beside what others do: the decoder sees its source, and of its target what is before.

Letters in shapes: S positions of the decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terakoya.contract import architecture, batches, toy
from terakoya.contract.findings import Check, NotLookedAt, Wrong


def writes_in_order(subject: architecture.Subject) -> None:
    """With a seq2seq head, a token of the target changes nothing before it."""
    if not _writes(subject):
        return
    batch = subject.row(subject.length())
    place = batch["decoder_input_ids"].shape[1] // 2
    changed = {**batch, "decoder_input_ids": _others(batch["decoder_input_ids"], slice(place, None))}
    before, after = subject.hidden(batch), subject.hidden(changed)
    found = batches.difference(before[:, :place], after[:, :place])
    if found > architecture.TOLERANCE:
        raise Wrong(
            f"the decoder's hidden states differ by {found:.1g} before the place where its input was changed: it sees "
            "what it is to write. Hand it a mask made of attention.causal_mask(batch['decoder_document_ids'])"
        )
    if torch.equal(before[:, place], after[:, place]):
        raise Wrong("a changed token changes nothing at its own place either; does the decoder get decoder_input_ids?")


def reads_its_source(subject: architecture.Subject) -> None:
    """With a seq2seq head, every token of the target sees the whole source of its document, and only that."""
    if not _writes(subject):
        return
    first = 9 if subject.architecture.isolation != "none" else subject.length()
    further = (subject.length() - first,) if first < subject.length() else ()
    batch = subject.row(first, *further)
    documents, hidden = batch["decoder_document_ids"][0], subject.hidden(batch)
    for place in (0, first - 1):
        changed = {**batch, "input_ids": _others(batch["input_ids"], slice(place, place + 1))}
        moved = (subject.hidden(changed) - hidden).abs().amax(-1)[0] > 0
        if not bool(moved[documents == 0].all()):
            raise Wrong(
                f"a changed token at place {place} of the source leaves hidden states of its target as they were; does "
                "the decoder get what the encoder made, with a mask for all of it: attention.document_mask(target, "
                "source)?"
            )
        if bool(moved[documents != 0].any()):
            raise Wrong(
                "a changed token of one document's source changes the target of another in the row; hand the decoder "
                "attention.document_mask(target, source) for what the encoder made"
            )


def _writes(subject: architecture.Subject) -> bool:
    """Whether the subject has a seq2seq head. Raises NotLookedAt where its model here is for another."""
    if "seq2seq" not in subject.architecture.heads:
        return False
    if subject.head != "seq2seq":
        raise NotLookedAt(f"its hidden states are looked at with the head {subject.head!r}")
    return True


def _others(ids: Tensor, where: slice) -> Tensor:
    """`ids` (1, S) with other words at `where`."""
    first = len(toy.VOCABULARY.special)
    changed = ids.clone()
    changed[:, where] = first + (changed[:, where] - first + 1) % (toy.VOCABULARY.size - first)
    return changed


CHECKS: tuple[Check, ...] = (writes_in_order, reads_its_source)
