"""What a run's objective finds on each row of a store: the same rows with the same masks for every model.

Letters: n rows, k terms of the objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from terakoya.components import LossTerm
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.rows.row_source import RowSource
from terakoya.rows.stores import validation_rows
from terakoya.store.document_sizes import TextPerToken
from terakoya.store.token_store import TokenStore
from terakoya.store.tokenizer_identity import check_tokenizer_of_run
from terakoya.training.batches import to_device
from terakoya_compare.statistics import Test, bootstrap_of_sums
from terakoya_evaluation.objective import RunObjective

JOINED = ("stream", "megatron")
"""Layouts in which every row shares a document with the next one."""


@dataclass(frozen=True)
class RowLosses:
    """What a model's objective finds on the rows of a store.

    Attributes:
        terms: those of the objective that are reported, by name.
        sums, counts: of each row, (n, k) float64: what a term's mean is the quotient of.
        blocks: the number of the block of rows that share documents, of each row, (n,).
        tokens: in all rows, with special ones.
        text: how much text a token of the store stands for; None where it is not known.
    """

    terms: dict[str, LossTerm]
    sums: np.ndarray
    counts: np.ndarray
    blocks: np.ndarray
    tokens: int
    text: TextPerToken | None

    def scores(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the scores by name, each with the weights (k,) of the terms' means in it: `loss`, the terms, and what
        these are in bits a character."""
        losses = [each.weight or 0.0 for each in self.terms.values()]
        yield "loss", np.array(losses)
        for number, (name, term) in enumerate(self.terms.items()):
            weights = np.zeros(len(self.terms))
            weights[number] = 1.0
            if term.weight is None or np.count_nonzero(losses) > 1:
                yield name, weights
            if term.bits and self.text is not None:
                yield f"{term.bits}_per_character", weights / (math.log(2) * self.text.characters)

    def mean(self, weights: np.ndarray) -> float:
        """Returns the score with these `weights`."""
        return float(weigh(self.sums.sum(axis=0), self.counts.sum(axis=0), weights))

    def compare(self, other: RowLosses, weights: np.ndarray) -> Test:
        """Returns the test of the difference of a score, `other` - this, by the bootstrap over blocks of rows: rows
        count by their tokens, of which short ones have few, and rows of one document are no independent pairs."""
        k = len(self.terms)
        columns = np.concatenate([self.sums, other.sums, self.counts], axis=1)
        sums = np.zeros((int(self.blocks.max()) + 1, columns.shape[1]))
        np.add.at(sums, self.blocks, columns)

        def difference(totals: np.ndarray) -> np.ndarray:
            return weigh(totals[:, k : 2 * k] - totals[:, :k], totals[:, 2 * k :], weights)

        return bootstrap_of_sums(sums, difference)


def weigh(sums: np.ndarray, counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the weighted sum of the means of terms, (...), of their sums and counts, (..., k)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(weights == 0, 0.0, sums / counts)
    found: np.ndarray = (means * weights).sum(axis=-1)
    return found


def measure_rows(objective: RunObjective, like: Parameters, store: TokenStore, limit: int | None) -> RowLosses:
    """Returns what the model of `objective` finds on the rows and masks of a run of the parameters `like`.

    Raises:
        UserError: the store has another tokenizer than the model's, or the model learned with another objective.
    """
    folder, wanted = objective.folder, like.objective
    if store.facts.vocabulary != objective.vocabulary:
        raise UserError(
            f"{store.folder}: was prepared with another tokenizer than that of {folder}: a loss of its tokens cannot "
            "be compared; give --corpus FILE, of which each model makes its own tokens, for bits a character"
        )
    check_tokenizer_of_run(store, folder / "tokenizer")
    own = objective.parameters.objective
    if type(own) is not type(wanted) or own.terms().keys() != wanted.terms().keys() or wanted.compares_examples:
        raise UserError(
            f"{folder}: its objective has other losses than A's, or losses that belong to no single row; compare "
            "exported models with --task"
        )
    longest, length = objective.parameters.architecture.max_sequence_length(), like.data.sequence_length
    if longest is not None and length > longest:
        raise UserError(f"{folder}: takes at most {longest} tokens, and A's rows have {length}; name that model first")
    source = validation_rows(store, wanted.row_layout(), sequence_length=length, seed=like.seed)
    positions = source.spread(len(source) if limit is None else min(limit, len(source)))
    terms = {name: term for name, term in wanted.terms().items() if not term.bins}
    sums, counts, tokens = [], [], 0
    for position in positions:
        rows = source.load(0, np.array([position]))
        tokens += int((rows.document_ids >= 0).sum())
        batch = wanted.collate(rows, objective.vocabulary)
        with torch.no_grad():
            found = objective.module(to_device(batch, objective.device, flash=objective.flash))
        sums.append(torch.stack([found[name].double() for name in terms]))
        counts.append([batch.counts[term.count] for term in terms.values()])
    return RowLosses(
        terms, torch.stack(sums).cpu().numpy(), np.array(counts, np.float64), find_blocks(source, positions), tokens,
        store.text_per_token,
    )  # fmt: skip


def find_blocks(source: RowSource, positions: np.ndarray) -> np.ndarray:
    """Returns the number of the block of each of the rows at `positions` (n,): rows that share a document are in one.
    Rows of a layout that joins all documents are a block each."""
    if source.layout.kind in JOINED:
        return np.arange(len(positions))
    parents, first_row = list(range(len(positions))), dict[int, int]()

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = row = parents[parents[row]]
        return row

    for row, position in enumerate(positions):
        for document in source.documents(0, np.array([position])).tolist():
            parents[root(row)] = root(first_row.setdefault(document, row))
    found: np.ndarray = np.unique([root(row) for row in range(len(positions))], return_inverse=True)[1]
    return found
