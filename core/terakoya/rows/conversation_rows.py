"""What is special about causal rows of conversations: none goes on in another row, and answers alone are labels.

Letters: n conversations, or places; B rows, T tokens of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from terakoya.components.rows import Conversations
from terakoya.errors import UserError
from terakoya.rows.packing import WINDOW, Plan, load_or_build_plan, plan_single_rows

if TYPE_CHECKING:
    from terakoya.store.token_store import TokenStore

logger = logging.getLogger("terakoya")

Spans = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""(first, stop) -> where the inputs of the conversations [first, stop) start in the tokens, and how many they are."""


def check_store(store: TokenStore, settings: Conversations | None) -> None:
    """Raises UserError where answers are asked for and the store has none; warns where it has and nobody asks."""
    if settings is not None and not store.facts.answers:
        raise UserError(
            f"{store.folder}: expected a store of conversations, in which answers are marked, got one of plain text; "
            "make one: terakoya prepare FILES.jsonl --conversations --tokenizer DIR --out STORE"
        )
    if settings is None and store.facts.answers:
        logger.warning(
            "%s: holds conversations, of which every token is learnt, questions too: the objective does not look at "
            "what is marked as answers; instruction does",
            store.folder,
        )


@dataclass(frozen=True)
class ConversationPlan:
    """Which conversations stand in which row, and how far."""

    store: TokenStore
    settings: Conversations
    sequence_length: int
    spans: Spans

    def packed(self) -> Plan:
        """Several in a row, best-fit; a sidecar of the store."""
        self._tell()
        return load_or_build_plan(
            self.store.folder,
            self.store.fingerprint,
            kind=f"conversations-{self.settings.too_long}{'-all' * (self.settings.loss_on == 'all')}",
            sequence_length=self.sequence_length,
            special_tokens=0,
            count=self.store.facts.documents,
            spans=self._fitted,
        )

    def padded(self) -> Plan:
        """One in a row, in the store's order."""
        self._tell()
        starts, lengths = self._fitted(0, self.store.facts.documents)
        return plan_single_rows(starts, lengths, sequence_length=self.sequence_length, special_tokens=0)

    def _fitted(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """`spans` of at most a row; 0 tokens where nothing is left to learn from."""
        starts, lengths = self.spans(first, stop)
        too_long = np.flatnonzero(lengths > self.sequence_length)
        lengths = np.minimum(lengths, self.sequence_length)
        if self.settings.too_long == "drop":
            lengths[too_long] = 0
        elif self.settings.loss_on != "all":
            for number in too_long.tolist():
                begin = int(starts[number]) + 1  # the first token is no label
                if not self.store.answers(begin, begin + self.sequence_length).any():
                    lengths[number] = 0
        return starts, lengths

    def _tell(self) -> None:
        """Says how many conversations are longer than a row, and what becomes of them."""
        count, long, left_out = self.store.facts.documents, 0, 0
        for first in range(0, count, WINDOW):
            stop = min(first + WINDOW, count)
            long += int(np.count_nonzero(self.spans(first, stop)[1] > self.sequence_length))
            left_out += int(np.count_nonzero(self._fitted(first, stop)[1] == 0))
        if not long:
            return
        became = "they are left out"
        if self.settings.too_long == "truncate":
            became = f"{long - left_out:,} are cut at its end"
            became += f", {left_out:,} are left out, since no answer begins before it" if left_out else ""
        logger.warning(
            "%s: %s of %s conversations are longer than a row of %d tokens: %s",
            self.store.folder,
            f"{long:,}",
            f"{count:,}",
            self.sequence_length,
            became,
        )


def flags_at(bits: tuple[np.ndarray, int], places: np.ndarray) -> np.ndarray:
    """(n,) bool: the flags of `bits`, as `TokenStore.word_bits` has them, at `places` (n,), of which those behind the
    end are whatever stands last."""
    packed, skipped = bits
    places = places + skipped
    flags: np.ndarray = (np.take(packed, places >> 3, mode="clip") >> (places & 7).astype(np.uint8)) & 1
    return flags.view(bool)


def last_runs(flags: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
    """`flags` (B, T) bool, of each document in each row only those of the last run of adjacent ones."""
    shape = flags.shape
    changes = np.ones(shape, bool)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = changes.copy()
    begins[:, 1:] |= ~flags[:, :-1]
    begins &= flags
    documents = np.cumsum(changes.ravel()) - 1
    last = np.full(int(documents[-1]) + 1, -1)
    at = np.flatnonzero(begins)
    last[documents[at]] = at  # the last of equal documents stays
    kept = flags.ravel() & (np.arange(flags.size) >= last[documents])
    return kept.reshape(shape)
