"""Global normalisation: every loss is its sum over all ranks and micro-steps, divided by its global count.

So the gradient is that of one big batch, however rows are spread: a node with fewer rows, a row with fewer masked
tokens, a last micro-step that is not full weigh what they hold and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terakoya.components import Batch, LossTerm


def total_counts(batches: Sequence[Batch], names: Sequence[str]) -> list[int]:
    """The sum of each count in `names` over this rank's micro-batches."""
    return [sum(batch.counts[name] for batch in batches) for name in names]


def weighted_loss(
    sums: Mapping[str, Tensor], terms: Mapping[str, LossTerm], counts: Mapping[str, int], factor: float = 1.0
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


Derived = Callable[[Mapping[str, np.ndarray], Mapping[str, int]], Mapping[str, float]]
"""`Objective.derive_metrics`."""


class Meter:
    """Sums and counts since they were last taken; sums stay on the device until then, in float64."""

    def __init__(self, terms: Mapping[str, LossTerm], device: torch.device, derived: Derived | None = None) -> None:
        self.terms = terms
        self.derived = derived
        sizes = [term.bins or 1 for term in terms.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self.sums = {  # views of `flat`
            name: piece if term.bins else piece[0]
            for (name, term), piece in zip(terms.items(), self.flat.split(sizes), strict=True)
        }
        self.counts = dict.fromkeys({term.count for term in terms.values()}, 0)
        self.seen: set[str] = set()

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Adds one micro-step's sums of this rank; never waits for the device."""
        for name, total in self.sums.items():
            if name in sums:
                total += sums[name]
        self.seen.update(sums)

    def stacked(self) -> Tensor:
        """All sums, those of a term with `bins` one after another, in the order of the terms: a new tensor (n,) on the
        device."""
        return self.flat.clone()

    def state(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {"sums": self.flat.tolist(), "counts": self.counts, "seen": sorted(self.seen)}

    def add_state(self, sums: Sequence[float]) -> None:
        """Adds the sums of a `state`."""
        self.flat += torch.tensor(sums, dtype=torch.float64, device=self.flat.device)

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Adds global counts."""
        for name in self.counts:
            self.counts[name] += counts[name]

    def take(self, global_sums: Tensor) -> dict[str, float]:
        """The means since the last time, from `global_sums` (`stacked` summed over ranks), and a new start.

        `loss` is the weighted sum of the losses; a mean over nothing is left out. What the objective derives follows.
        """
        means: dict[str, float] = {}
        seen: dict[str, np.ndarray] = {}
        loss = 0.0
        values, start = global_sums.cpu().numpy(), 0
        for name, term in self.terms.items():
            stop = start + (term.bins or 1)
            piece, start = values[start:stop], stop
            if name not in self.seen:
                continue
            seen[name] = piece if term.bins else piece[0]
            if term.bins or not self.counts[term.count]:
                continue
            means[name] = float(piece[0]) / self.counts[term.count]
            loss += (term.weight or 0.0) * means[name]
        derived = self.derived(seen, self.counts) if self.derived else {}
        self.flat.zero_()
        self.counts = dict.fromkeys(self.counts, 0)
        self.seen.clear()
        return {"loss": loss, **means, **derived}
