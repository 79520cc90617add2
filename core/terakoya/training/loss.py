"""Global normalisation: every loss is its sum over all ranks and micro-steps, divided by its global count.

So the gradient is that of one big batch, however rows are spread: a node with fewer rows, a row with fewer masked
tokens, a last micro-step that is not full weigh what they hold and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from terakoya.components import Batch, Term


def total_counts(batches: Sequence[Batch], names: Sequence[str]) -> np.ndarray:
    """The sum of each count in `names` over this rank's micro-batches, (n,) int64."""
    return (
        np.array([[batch.counts[name] for name in names] for batch in batches], dtype=np.int64)
        .reshape(len(batches), len(names))
        .sum(axis=0)
    )


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
        self.names = list(terms)
        self.sums = torch.zeros(len(terms), dtype=torch.float64, device=device)
        self.counts = dict.fromkeys({term.count for term in terms.values()}, 0)
        self.seen: set[str] = set()

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Adds one micro-step's sums of this rank; never waits for the device."""
        row = [sums[name].double() if name in sums else self.sums.new_zeros(()) for name in self.names]
        self.sums += torch.stack(row)
        self.seen.update(sums)

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Adds global counts."""
        for name in self.counts:
            self.counts[name] += counts[name]

    def take(self, global_sums: Tensor) -> dict[str, float]:
        """The means since the last time, from `global_sums` (this meter's `sums`, summed over ranks), and a new start.

        `loss` is the weighted sum of the losses; a mean over nothing is left out.
        """
        values = dict(zip(self.names, global_sums.tolist(), strict=True))
        means = {}
        loss = 0.0
        for name in self.names:
            term = self.terms[name]
            if name not in self.seen or not self.counts[term.count]:
                continue
            means[name] = values[name] / self.counts[term.count]
            loss += (term.weight or 0.0) * means[name]
        self.sums.zero_()
        self.counts = dict.fromkeys(self.counts, 0)
        self.seen.clear()
        return {"loss": loss, **means}
