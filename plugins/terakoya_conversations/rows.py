"""Causal rows of conversations: no conversation continues in another row, and only answers are labels.

Letters: n conversations or tokens; B rows, T tokens of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from terakoya.errors import UserError
from terakoya.rows.packing import WINDOW, Plan, PlanKind, load_or_build_plan, plan_single_rows

if TYPE_CHECKING:
    from terakoya.store.token_store import TokenStore

logger = logging.getLogger("terakoya")

Spans = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""(first, stop) -> where the inputs of the conversations [first, stop) start in the tokens, and their lengths."""


_KINDS = {"answers": "", "last_answer": "-last", "all": "-all"}
"""What the name of a plan says of `loss_on`, which decides which truncated conversations are left out."""


@dataclass(frozen=True)
class Conversations:
    """How a store of conversations is used. Each conversation stays whole in one row.

    `loss_on`: the tokens that are labels: those of all answers, of a conversation's last answer, or all tokens.
    `too_long`: how a conversation with more tokens than a row is handled: `truncate` cuts its end off (and drops it if
    no label remains), `drop` drops it.
    """

    loss_on: Literal["answers", "last_answer", "all"] = "answers"
    too_long: Literal["truncate", "drop"] = "truncate"

    @property
    def only_learned(self) -> bool:
        """Whether the marks of answers are used."""
        return self.loss_on != "all"

    def check(self, store: TokenStore) -> None:
        """Raises UserError for a store of plain text."""
        if not store.facts.learned:
            raise UserError(
                f"{store.folder}: expected a store of conversations, in which answers are marked, got one of plain "
                "text; write one: terakoya prepare FILES.jsonl --conversations --tokenizer DIR --out STORE"
            )

    def plan(self, store: TokenStore, kind: str, sequence_length: int, spans: Spans) -> Plan:
        """Returns the plan of rows of several conversations (`packed`), a sidecar of the store, or of one each."""
        plan = _ConversationPlan(store, self, sequence_length, spans)
        return plan.plan_packed() if kind == "packed" else plan.plan_padded()

    def choose_labels(self, learned: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
        """Returns the tokens of all answers, or of the last one of each conversation."""
        return keep_last_runs(learned, document_ids) if self.loss_on == "last_answer" else learned


@dataclass(frozen=True)
class _ConversationPlan:
    """The conversations of each row, and where they are truncated."""

    store: TokenStore
    settings: Conversations
    sequence_length: int
    spans: Spans

    def plan_packed(self) -> Plan:
        """Several conversations in a row, best-fit; the plan is a sidecar of the store."""
        self._log_long_conversations()
        kind = f"conversations-{self.settings.too_long}{_KINDS[self.settings.loss_on]}"
        wanted = PlanKind(kind, self.sequence_length, 0, self.store.facts.documents)
        return load_or_build_plan(self.store.local_folder, self.store.fingerprint, wanted, self._truncated_spans)

    def plan_padded(self) -> Plan:
        """One conversation in a row, in the store's order."""
        self._log_long_conversations()
        starts, lengths = self._truncated_spans(0, self.store.facts.documents)
        return plan_single_rows(starts, lengths, sequence_length=self.sequence_length, special_tokens=0)

    def _truncated_spans(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """`spans` truncated to a row; length 0 for conversations that are left out."""
        starts, whole = self.spans(first, stop)
        too_long = np.flatnonzero(whole > self.sequence_length)
        lengths = np.minimum(whole, self.sequence_length)
        if self.settings.too_long == "drop":
            lengths[too_long] = 0
        elif self.settings.loss_on != "all":
            for number in too_long.tolist():
                begin = int(starts[number]) + 1  # the first token is not a label
                learnt = self.store.read_learned(begin, begin + whole[number])
                if self.settings.loss_on == "last_answer":
                    learnt = keep_last_runs(learnt[None], np.zeros((1, len(learnt)), np.int32))[0]
                if not learnt[: self.sequence_length].any():
                    lengths[number] = 0
        return starts, lengths

    def _log_long_conversations(self) -> None:
        """Warns with the number of conversations longer than a row that are truncated or left out."""
        count, long, left_out = self.store.facts.documents, 0, 0
        for first in range(0, count, WINDOW):
            stop = min(first + WINDOW, count)
            long += int(np.count_nonzero(self.spans(first, stop)[1] > self.sequence_length))
            left_out += int(np.count_nonzero(self._truncated_spans(first, stop)[1] == 0))
        if not long:
            return
        consequence = "they are left out"
        if self.settings.too_long == "truncate":
            consequence = f"{long - left_out:,} are truncated"
            which = "their last answer does not begin" if self.settings.loss_on == "last_answer" else "no answer begins"
            consequence += f", {left_out:,} are left out because {which} within the row" if left_out else ""
        logger.warning(
            "%s: %s of %s conversations are longer than a row of %d tokens: %s",
            self.store.folder,
            f"{long:,}",
            f"{count:,}",
            self.sequence_length,
            consequence,
        )


def keep_last_runs(flags: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
    """`flags` (B, T) bool, of which only the last run of adjacent ones of each document in each row stays set."""
    shape = flags.shape
    changes = np.ones(shape, bool)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = changes.copy()
    begins[:, 1:] |= ~flags[:, :-1]
    begins &= flags
    documents = np.cumsum(changes.ravel()) - 1
    last = np.full(int(documents[-1]) + 1, -1)
    begin = np.flatnonzero(begins)
    last[documents[begin]] = begin  # of equal documents numpy keeps the last value
    kept = flags.ravel() & (np.arange(flags.size) >= last[documents])
    return kept.reshape(shape)
