"""Masking for masked language models (Devlin et al., 2018), by whole words or tokens: a pure function of rows and keys.

The budget rule: in each row the words are ordered by their random numbers. Going through them in this order, a word is
masked if it fits into the rest of the row's budget, else skipped, until the budget or the words are used up.

Letters: B rows, T tokens of a row, E parts of all rows, K slots.

See docs/design/masking.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from terakoya.components import Batch
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.random_keys import bernoulli, integers_below, numbers, streams

if TYPE_CHECKING:
    from terakoya.components.rows import Rows

IGNORED = -100
"""The label of an unused slot, which torch's cross entropy ignores."""
_SPREAD = np.uint64(0x9E3779B9)
"""Odd, near 2**32 / the golden ratio: products of neighbouring numbers are far apart (Knuth, vol. 3, 6.4)."""


@dataclass(frozen=True)
class MaskedRows:
    """Rows after masking.

    Attributes:
        input_ids: (B, T) int64, the tokens with replacements.
        positions: (K,) int64, indices into the flattened (B * T) batch, ascending; 0 in unused slots, which come last.
        labels: (K,) int64, the original tokens there; -100 in unused slots.
        count: the number of used slots.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    count: int


def mask_rows(
    rows: Rows,
    vocabulary: Vocabulary,
    *,
    objective: str,
    probability: float,
    whole_words: bool,
    budgeted: bool,
    replace: tuple[float, float],
) -> tuple[MaskedRows, Batch]:
    """Masks `rows` (B, T) by their keys, except special tokens; `objective` is the name in errors.

    The batch has `input_ids`, `position_ids`, `document_ids` (B, T), `masked_positions` (K,), indices into the
    flattened rows, and `masked_labels` (K,), -100 in unused slots; its counts are masked and tokens. The other
    arguments are as in `mask`.
    """
    if vocabulary.mask is None:
        raise UserError(f"objective {objective}: the store's vocabulary has no [MASK]; use a tokenizer that has one")
    if whole_words and rows.word_starts is None:
        raise UserError(
            f"objective {objective}: whole_word_mask needs word starts, which this store does not have; "
            "its tokenizer does not know words. Set objective.whole_word_mask to false"
        )
    real = rows.document_ids >= 0
    masked = mask(
        rows.tokens,
        rows.word_starts if whole_words else None,
        real & ~vocabulary.is_special.take(rows.tokens),
        rows.keys,
        probability=probability,
        budgeted=budgeted,
        replace=replace,
        vocabulary=vocabulary,
    )
    arrays = {
        "input_ids": masked.input_ids,
        "position_ids": rows.position_ids.astype(np.int64),
        "document_ids": rows.document_ids.astype(np.int64),
        "masked_positions": masked.positions,
        "masked_labels": masked.labels,
    }
    return masked, Batch(arrays, {"masked": masked.count, "tokens": int(np.count_nonzero(real))})


def mask(
    tokens: np.ndarray,
    word_starts: np.ndarray | None,
    maskable: np.ndarray,
    keys: np.ndarray,
    *,
    probability: float,
    vocabulary: Vocabulary,
    budgeted: bool = True,
    replace: tuple[float, float] = (0.8, 0.1),
    per_word: bool = False,
) -> MaskedRows:
    """Masks `tokens` (B, T) by the rows' `keys` (B,) uint64.

    Only tokens where `maskable` (B, T) is True can be chosen. A word starts where `word_starts` (B, T) is True, and
    where the left neighbour is not maskable; without `word_starts` every token is a word.

    `budgeted`: each row's budget is round(probability x maskable tokens), halves up and at least 1; K is
    B x round(probability x T). In a row in which every word is longer than the budget, no token is masked. Without
    `budgeted`, each word is chosen independently with `probability`, and K is larger where a batch needs it.

    `replace`: the shares of chosen tokens that become [MASK] and a random ordinary token; the others stay unchanged.
    This is decided for each token, or with `per_word` for each word.

    Raises:
        UserError: the vocabulary has no [MASK] or, with random replacements, no ordinary token.
    """
    if vocabulary.mask is None:
        raise UserError("masking: expected a vocabulary with a mask token, got none; use a tokenizer that has [MASK]")
    if replace[1] > 0 and not len(vocabulary.ordinary):
        raise UserError("masking: random replacements need ordinary tokens, got a vocabulary of special ones only")
    batch, width = tokens.shape
    stream = streams(keys, "mask")
    drawn = numbers(stream[:, None], np.arange(width)).reshape(
        -1
    )  # one for each token; a word has that of its first token
    edges = _edges(word_starts, maskable)
    if budgeted:
        budgets = np.maximum(1, (probability * np.count_nonzero(maskable, axis=1) + 0.5).astype(np.int64))
        chosen = _within_budget(drawn, edges, maskable, budgets, probability)
    else:
        chosen = _words(bernoulli(drawn, probability), edges, maskable)
    starts = edges.take(chosen)
    lengths = edges.take(chosen + 1) - starts
    positions = np.repeat(starts - (lengths.cumsum() - lengths), lengths)
    positions += np.arange(len(positions))

    input_ids = tokens.astype(np.int64)
    flat = input_ids.reshape(-1)
    slots = max(batch * max(1, int(probability * width + 0.5)), len(positions))
    padded, labels = np.zeros(slots, np.int64), np.full(slots, IGNORED, np.int64)
    padded[: len(positions)] = positions
    labels[: len(positions)] = flat.take(positions)
    second = drawn.take(positions) << np.uint64(32)  # the lower half: the choice of words has used the upper one
    decision = np.repeat(drawn.take(starts) << np.uint64(32), lengths) if per_word else second
    masked = bernoulli(decision, replace[0])
    flat[positions.compress(masked)] = vocabulary.mask
    if replace[1] > 0:
        random = np.flatnonzero(bernoulli(decision, sum(replace)) & ~masked)
        fresh = integers_below(second.take(random) * _SPREAD, len(vocabulary.ordinary))
        flat[positions.take(random)] = vocabulary.ordinary.take(fresh)
    return MaskedRows(input_ids, padded, labels, len(positions))


def _edges(word_starts: np.ndarray | None, maskable: np.ndarray) -> np.ndarray:
    """Returns the indices (E + 1,) int64 into the flattened (B, T) where a word, or a token that is not maskable,
    starts; then B * T.

    Part e consists of the tokens from edges[e] up to edges[e + 1]: one word, or one token that is not maskable.
    """
    if word_starts is None:
        return np.arange(maskable.size + 1)
    begins = np.empty(maskable.size + 1, bool)
    other = ~maskable
    inside = begins[:-1].reshape(maskable.shape)
    np.logical_or(word_starts, other, out=inside)
    inside[:, 0] = begins[-1] = True
    begins[1:] |= other.reshape(-1)
    return np.flatnonzero(begins)


def _words(wanted: np.ndarray, edges: np.ndarray, maskable: np.ndarray) -> np.ndarray:
    """Returns the numbers (n,), ascending, of the parts that are words and whose first token is `wanted` (B * T,)
    bool."""
    wanted &= maskable.reshape(-1)
    return np.flatnonzero(wanted.take(edges[:-1]))


def _within_budget(
    drawn: np.ndarray, edges: np.ndarray, maskable: np.ndarray, budgets: np.ndarray, probability: float
) -> np.ndarray:
    """Returns the numbers (n,), ascending, of the words that the budget rule masks; `drawn` (B * T,), `budgets` (B,).

    The words with the smallest numbers usually fill the budget, so only those are sorted; rows that they do not fill
    are computed again with all of their words. Both ways choose the same words.
    """
    batch, width = maskable.shape
    margin = 3 * (1.5 * probability * batch / max(1, len(edges))) ** 0.5
    early = _words(bernoulli(drawn, probability + margin), edges, maskable)
    taken, unfilled = _greedy(drawn, edges, early, width, budgets)
    if unfilled.any() and probability + margin < 1:
        others = np.repeat(unfilled, width)
        taken = taken[~unfilled[edges.take(taken) // width]]
        again, _ = _greedy(drawn, edges, _words(others, edges, maskable), width, budgets)
        taken = np.sort(np.concatenate([taken, again]))
    return taken


def _greedy(
    drawn: np.ndarray, edges: np.ndarray, words: np.ndarray, width: int, budgets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns those of `words` (n,), ascending, that the budget rule masks, and whether each row (B,) bool is unfilled.

    Words are ordered by the upper 32 bits of their random numbers; among equal numbers the earlier word comes first.
    """
    starts = edges.take(words)
    lengths = edges.take(words + 1)
    lengths -= starts
    first = starts.searchsorted(np.arange(0, len(budgets) * width + 1, width))
    order = _in_order(starts // width, drawn.take(starts), len(budgets))
    sizes = lengths.take(order)
    total = sizes.cumsum()
    before = np.concatenate([[0], total])  # tokens before each word in this order, then of all words
    limits = before.take(first[:-1]) + budgets
    until = np.minimum(total.searchsorted(limits, side="right"), first[1:])
    rest = limits - before.take(until)
    mark = np.empty(len(words), bool)
    mark[order] = total <= np.repeat(limits, first[1:] - first[:-1])
    for row in np.flatnonzero(rest).tolist():  # after the word that was too long, every word that still fits
        room, at, stop = int(rest[row]), int(until[row]) + 1, int(first[row + 1])
        while room and at < stop:
            for place, size in enumerate(sizes[at : min(at + 16, stop)].tolist(), at):
                if size <= room:
                    mark[order[place]] = True
                    room -= size
                    if not room:
                        break
            at += 16
        rest[row] = room
    return words.compress(mark), rest > 0


def _in_order(row: np.ndarray, drawn: np.ndarray, rows: int) -> np.ndarray:
    """Returns the order (n,) by `row` (n,), then by the upper half of `drawn` (n,); among equals the earlier comes
    first."""
    index_bits, row_bits = 20, 12
    if len(row) > 1 << index_bits or rows > 1 << row_bits:
        return np.lexsort((drawn >> np.uint64(32), row))
    order = row.view(np.uint64) << np.uint64(64 - row_bits)
    order |= (drawn >> np.uint64(32)) << np.uint64(index_bits)
    order |= np.arange(len(row), dtype=np.uint64)
    order.sort()
    order &= np.uint64((1 << index_bits) - 1)
    return order.view(np.int64)
