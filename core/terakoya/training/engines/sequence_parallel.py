"""Slices of rows for sequence and context parallelism: the processes of a replica divide the positions of its rows.

Every process of a replica has the same slice of each of the replica's rows, so it keeps only its part of the
activations. Processes communicate in every attention (`sequence_attention`). Losses are sums over positions, so each
process has the sums of its own positions, and the gradient of each weight is the sum over all processes. This needs an
objective whose terms are sums over positions (`Objective.sums_by_position`) and a model whose attention takes an
`Exchange`.

Letters in shapes: B rows, T positions of a row, P processes that share them, K slots of masked positions.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

WHOLE = "document_ids"
"""The array (B, T) that every process needs whole: it says which positions may attend to each other."""
MASKED_POSITIONS, MASKED_LABELS = "masked_positions", "masked_labels"
"""Indices (K,) into the flattened rows, and the labels there (K,)."""


def position_slice(batch: Mapping[str, Tensor], index: int, processes: int) -> slice:
    """Returns the positions of each row that process `index` of `processes` works on."""
    size, rest = divmod(batch[WHOLE].shape[1], processes)
    assert not rest, "checked when the parameters are read"
    return slice(index * size, (index + 1) * size)


def slice_positions(batch: Mapping[str, Tensor], index: int, processes: int) -> dict[str, Tensor]:
    """Returns the part of `batch`, whose rows are (B, T), that process `index` of `processes` works on.

    Arrays (B, T) become slice `index` of their positions, (B, T / P), except for `document_ids`, which stays whole. Of
    masked positions those within the slice remain, as indices into the flattened slices. Other entries do not change.
    """
    (rows, length), positions = batch[WHOLE].shape, position_slice(batch, index, processes)
    first, size = positions.start, length // processes
    part = {
        name: value[:, positions] if value.shape == (rows, length) and name != WHOLE else value
        for name, value in batch.items()
    }
    if MASKED_POSITIONS in batch:
        row, position = batch[MASKED_POSITIONS] // length, batch[MASKED_POSITIONS] % length
        inside = (position >= first) & (position < first + size)
        part[MASKED_POSITIONS] = (row * size + position - first)[inside]
        part[MASKED_LABELS] = batch[MASKED_LABELS][inside]
    return part
