"""Global normalisation: every loss is its sum over all ranks and micro-steps, divided by its global count.

The gradient is therefore that of one big batch, however its rows are distributed: a node with fewer rows, a row with
fewer masked tokens, or a last micro-step with fewer rows contributes in proportion to what it counts.

See docs/design/losses.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terakoya.components import LossTerm
from terakoya.store.document_sizes import TextPerToken


def weighted_loss(
    sums: Mapping[str, Tensor], terms: Mapping[str, LossTerm], counts: Mapping[str, int], factor: float = 1.0
) -> Tensor:
    """Returns the part of the global loss that `sums` contribute: sum over losses of weight x sum / global count.

    A global count of 0, and a `factor` of 0 (a dummy micro-batch), give exactly 0, with a gradient of 0. A loss that is
    not finite has gradients that are not finite either, so that the gradient norm alone tells every rank of it.
    """
    loss: Tensor | None = None
    for name, term in terms.items():
        if term.weight is None:
            continue
        count = counts[term.count]
        contribution = sums[name] * (factor * term.weight / count if count else 0.0)
        loss = contribution if loss is None else loss + contribution
    assert loss is not None, "an objective has at least one loss"
    return loss * torch.rsub(loss.detach(), 1.0, alpha=0.0)  # times 1 - 0 x loss, which is 1 or NaN


def to_bits(means: Mapping[str, float], terms: Mapping[str, LossTerm], text: TextPerToken | None) -> dict[str, float]:
    """Returns the `means` of terms with `bits` for each character and byte, where each token stands for `text`."""
    if text is None:
        return {}
    bits = {term.bits: means[name] / math.log(2) for name, term in terms.items() if term.bits and name in means}
    return {
        f"{prefix}_per_{unit}": number / per_token
        for prefix, number in bits.items()
        for unit, per_token in (("character", text.characters), ("byte", text.bytes))
    }


DeriveMetrics = Callable[[Mapping[str, np.ndarray], Mapping[str, int]], Mapping[str, float]]
"""`Objective.derive_metrics`."""


class Meter:
    """Sums and counts since the means were last taken. Sums stay on the device until then, in float64.

    Attributes:
        flat: this rank's sums of all terms, in the order of the terms, (n,); a term with `bins` has one for each bin.
        sums: the same, by name: views of `flat`.
        counts: global counts, by name.
        seen: names of the terms of which there is any sum.
    """

    def __init__(
        self, terms: Mapping[str, LossTerm], device: torch.device, derive_metrics: DeriveMetrics | None = None
    ) -> None:
        self.terms = terms
        self.derive_metrics = derive_metrics
        sizes = [term.bins or 1 for term in terms.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self.sums = {
            name: view if term.bins else view[0]
            for (name, term), view in zip(terms.items(), self.flat.split(sizes), strict=True)
        }
        self.counts = dict.fromkeys((term.count for term in terms.values()), 0)
        self.seen: set[str] = set()

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Adds this rank's sums of one micro-step; never waits for the device."""
        for name, total in self.sums.items():
            if name in sums:
                total += sums[name]
        self.seen.update(sums)

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Adds global counts."""
        for name in self.counts:
            self.counts[name] += counts[name]

    def take_step(self, step: Meter, *, where: Tensor | None) -> None:
        """Adds the sums of `step`, a meter of the same terms, and clears it; never waits for the device. `where` is
        whether to add them, () bool on the device; None always does."""
        self.flat += step.flat if where is None else torch.where(where, step.flat, 0.0)
        self.seen |= step.seen
        step.flat.zero_()

    def local_sums(self) -> Tensor:
        """Returns this rank's sums: a new tensor (n,) on the device, like `flat`."""
        return self.flat.clone()

    def take_means(self, global_sums: Tensor) -> dict[str, float]:
        """Returns the means since the last call from `global_sums`, which are `local_sums` summed over ranks, then
        resets all sums and counts. They are `loss`, the weighted sum of the losses; the mean of each term that was
        counted; and what the objective derives from the sums."""
        means: dict[str, float] = {}
        seen: dict[str, np.ndarray] = {}
        loss = 0.0
        values, start = global_sums.cpu().numpy(), 0
        for name, term in self.terms.items():
            stop = start + (term.bins or 1)
            term_sums, start = values[start:stop], stop
            if name not in self.seen:
                continue
            seen[name] = term_sums if term.bins else term_sums[0]
            if term.bins or not self.counts[term.count]:
                continue
            means[name] = float(term_sums[0]) / self.counts[term.count]
            loss += (term.weight or 0.0) * means[name]
        derived = self.derive_metrics(seen, self.counts) if self.derive_metrics else {}
        self.flat.zero_()
        self.counts = dict.fromkeys(self.counts, 0)
        self.seen.clear()
        return {"loss": loss, **means, **derived}

    def state(self) -> dict[str, Any]:
        """Returns the whole state, as JSON values."""
        sums = self.flat.tolist()
        return {"terms": list(self.terms), "sums": sums, "counts": self.counts, "seen": sorted(self.seen)}

    def has_terms_of(self, state: Mapping[str, Any]) -> bool:
        """Whether `state` is one of a meter of the same terms and counts."""
        terms = list(self.terms)
        return (
            state["terms"] == terms
            and state["counts"].keys() == self.counts.keys()
            and len(state["sums"]) == len(self.flat)
        )

    def add_state_sums(self, sums: Sequence[float]) -> None:
        """Adds the sums of a `state`."""
        self.flat += torch.tensor(sums, dtype=torch.float64, device=self.flat.device)
