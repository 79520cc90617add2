"""The order of the rows of a plan in an epoch, and each row's key: pure functions of seed, epoch and store."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from terakoya.toolkit.random_keys import hash_u64, permute, row_keys

_BLOCK = 1024
"""Number of positions whose rows are computed at once."""


class RowOrder:
    """Every row of an epoch once, in an order that depends on the seed; only the blocks used last are kept in memory.

    Letters: B positions.
    """

    def __init__(self, count: Callable[[int], int], *, seed: int, store_id: int | str, shuffle: bool) -> None:
        """`count(epoch)` is the number of rows in the plan of an epoch. `store_id` is a part of every
        key, as in `RowSource`. Without `shuffle` rows come in plan order."""
        self._count = count
        self._seed, self._store_id, self._shuffle = seed, store_id, shuffle
        self._blocks = lru_cache(maxsize=4)(self._block)

    def at(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The plan rows at `positions` (B,) of `epoch`, int64, and their keys, uint64."""
        first = int(positions.min(initial=0)) // _BLOCK
        last = int(positions.max(initial=0)) // _BLOCK
        if last - first > 1:
            return self._compute(epoch, positions)
        blocks = [self._blocks(epoch, block) for block in range(first, last + 1)]
        rows, keys = blocks[0] if len(blocks) == 1 else map(np.concatenate, zip(*blocks, strict=True))
        indices = positions - first * _BLOCK
        return rows.take(indices), keys.take(indices)

    def _block(self, epoch: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """`at` for a whole block, which costs little more than for one batch; the last few blocks are cached."""
        return self._compute(epoch, np.arange(block * _BLOCK, (block + 1) * _BLOCK))

    def _compute(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = positions
        if self._shuffle:
            count = self._count(epoch)
            rows = permute(positions % count, count, hash_u64(self._seed, epoch, self._store_id, "order"))
        return rows, row_keys(self._seed, epoch, self._store_id, rows)
