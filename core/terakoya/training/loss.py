"""Global normalisation: every loss is its sum over all ranks and micro-steps, divided by its global count.

So the gradient is that of one big batch, however rows are spread: a node with fewer rows, a row with fewer masked
tokens, a last micro-step that is not full weigh what they hold and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terakoya.components import Batch, Term


def total_counts(batches: Sequence[Batch], names: Sequence[str]) -> list[int]:
    """The sum of each count in `names` over this rank's micro-batches."""
    return [sum(batch.counts[name] for batch in batches) for name in names]


def weighted(
    sums: Mapping[str, Tensor], terms: Mapping[str, Term], counts: Mapping[str, int], factor: float = 1.0
) -> Tensor:
    """The share of the global loss that `sums` bring: sum over losses of weight x sum / global count.

    A global count of 0, and a `factor` of 0 (a dummy micro-batch), give exactly 0, with a gradient of 0.
    """
    loss: Tensor | None = None
    for name, term in terms.items():
        if term.weight is None:
            continue
        count = counts[term.count]
        share = sums[name] * (factor * term.weight / count if count else 0.0)
        loss = share if loss is None else loss + share
    assert loss is not None, "an objective has at least one loss"
    return loss


class Meter:
    """Sums and counts since they were last taken; sums stay on the device until then, in float64."""

    def __init__(self, terms: Mapping[str, Term], device: torch.device) -> None:
        self.terms = terms
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in terms}
        self.counts = dict.fromkeys({term.count for term in terms.values()}, 0)
        self.seen: set[str] = set()

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Adds one micro-step's sums of this rank; never waits for the device."""
        for name, total in self.sums.items():
            if name in sums:
                total += sums[name]
        self.seen.update(sums)

    def stacked(self) -> Tensor:
        """The sums (n,) in the order of the terms, a new tensor on the device."""
        return torch.stack(list(self.sums.values()))

    def state(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {"sums": self.stacked().tolist(), "counts": self.counts, "seen": sorted(self.seen)}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Adds global counts."""
        for name in self.counts:
            self.counts[name] += counts[name]

    def take(self, global_sums: Tensor) -> dict[str, float]:
        """The means since the last time, from `global_sums` (`stacked` summed over ranks), and a new start.

        `loss` is the weighted sum of the losses; a mean over nothing is left out.
        """
        means = {}
        loss = 0.0
        for (name, term), value in zip(self.terms.items(), global_sums.tolist(), strict=True):
            if name not in self.seen or not self.counts[term.count]:
                continue
            means[name] = value / self.counts[term.count]
            loss += (term.weight or 0.0) * means[name]
        for total in self.sums.values():
            total.zero_()
        self.counts = dict.fromkeys(self.counts, 0)
        self.seen.clear()
        return {"loss": loss, **means}
