"""Losses that compare every example of a step with all others: the part of the root module.

The loop computes the embeddings of all micro-batches first, without gradients, compares those of all processes, and
hands each micro-batch the gradient at its embeddings (Gao et al., 2021, arXiv:2101.06983). So a step has the losses and
gradients of one batch with all its rows, however they are divided.

Letters in shapes: E examples, V views of each, H size of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

EMBED = "embed_examples"
"""In a batch: the forward returns `EMBEDDINGS` and `REAL` alone."""
EMBEDDINGS, REAL = "embeddings", "real_examples"
GRADIENTS = "example_gradients"
"""In a batch: the gradient (E, V, H) of the loss, a sum over the step's examples, at this batch's embeddings."""
VALUES = "example_values."
"""In a batch, before the name of each term: its values (E,) for this batch's examples."""

Compare = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""`Objective.compare`."""


def forward_examples(
    batch: Mapping[str, Tensor], embeddings: Tensor, real: Tensor, compare: Compare
) -> dict[str, Tensor]:
    """Returns what the forward of a root module returns whose objective compares examples.

    Args:
        embeddings: (E, V, H) float32, of this batch.
        real: (E,) bool, which of them are examples.
        compare: the objective's; called here where the batch is all that there is to compare.
    """
    if EMBED in batch:
        return {EMBEDDINGS: embeddings, REAL: real}
    if GRADIENTS not in batch:
        return {name: values.sum() for name, values in compare(embeddings, real).items()}
    sums = {key.removeprefix(VALUES): values.sum() for key, values in batch.items() if key.startswith(VALUES)}
    pull = (embeddings * batch[GRADIENTS]).sum()
    loss = next(iter(sums))
    return sums | {loss: sums[loss] + (pull - pull.detach())}
