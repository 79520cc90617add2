"""Rows: training sequences of fixed length from a token store, each with a key that decides all its random numbers.

Letters: B rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.rows.causal_rows import CausalRows
from terakoya.rows.encoder_rows import EncoderRows
from terakoya.rows.row_order import RowOrder

if TYPE_CHECKING:
    from terakoya.store.token_store import TokenStore

__all__ = ["Layout", "RowSource", "Rows"]


class RowSource:
    """The rows of one store in one layout. An epoch has every row of the plan once, in an order that depends on the
    seed (`megatron`: in Megatron-LM's order)."""

    def __init__(
        self,
        store: TokenStore,
        layout: Layout,
        *,
        sequence_length: int,
        seed: int,
        store_id: int | str = 0,
        shuffle: bool = True,
    ) -> None:
        """Opens the plan of `store`; builds it first where it does not exist. `store_id` is a part of every key: the
        store's number in its blend, or where it is alone, as in validation, its fingerprint. Without `shuffle` rows
        come in plan order. Raises UserError if the store does not fit the layout, or has no text for a row."""
        self.store = store
        self.layout = layout
        self.sequence_length = sequence_length
        self.store_id = store_id
        self.vocabulary: Vocabulary = store.facts.vocabulary
        if store.facts.tokens == 0:
            raise UserError(f"{store.folder}: expected a store with tokens, got an empty one; prepare it again")
        self._builder: CausalRows | EncoderRows
        if layout.framing == "causal":
            self._builder = CausalRows(store, layout, sequence_length=sequence_length, seed=seed, shuffle=shuffle)
        else:
            self._builder = EncoderRows(store, layout, sequence_length=sequence_length, seed=seed, store_id=store_id)
        keyed = shuffle and layout.kind != "megatron"
        self._order = RowOrder(self._builder.count, seed=seed, store_id=store_id, shuffle=keyed)
        self._rows = self._builder.count(0)
        if self._rows == 0:
            raise UserError(
                f"{store.folder}: expected text for at least one row of layout {layout.kind}, got too little; "
                "prepare it again from more text"
            )

    def __len__(self) -> int:
        """Number of rows in an epoch. For pairs, the number of epoch 0 holds for all epochs."""
        return self._rows

    def load(self, epoch: int, positions: np.ndarray) -> Rows:
        """The rows at `positions` (B,), each in [0, len(self)), of `epoch`. The result does not depend on any state."""
        rows, keys = self._order.at(epoch, np.asarray(positions, np.int64))
        with self.store.reading():
            return self._builder.load(epoch, rows, keys)

    def spread(self, rows: int) -> np.ndarray:
        """Positions of `rows` rows, evenly taken from all: the first ones may be those of the longest documents."""
        return np.arange(rows) * len(self) // max(1, rows)

    def documents(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Numbers in the store, from 0, of the documents with text in the rows `load(epoch, positions)`, sorted."""
        rows, keys = self._order.at(epoch, np.asarray(positions, np.int64))
        with self.store.reading():
            return np.unique(self._builder.documents(epoch, rows, keys))

    def document_starts(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Where documents begin in the rows `load(epoch, positions)` of a causal layout, (B, T) bool. In layouts that
        join documents `Rows.document_ids` does not show this."""
        assert isinstance(self._builder, CausalRows), "the layout is causal"
        with self.store.reading():
            return self._builder.document_starts(epoch, self._order.at(epoch, np.asarray(positions, np.int64))[0])

    def blank_row(self) -> Rows:
        """One row with nothing to learn, for an empty slot of a micro-step."""
        return self._builder.blank_row()
