"""Masking for masked language models (Devlin et al., 2018), by whole words or tokens: a pure function of rows and keys.

The budget rule: the word of a random token of the row comes first, the other words follow in random order. Words are
masked in this order as long as they end before the row's budget, which is `probability` x maskable tokens, counted from
a random point in the first word. So every word is masked with exactly `probability`, however long it and its row are,
and a row's masked tokens differ from `probability` x maskable tokens by less than its longest word: on a circle of the
words, a window that begins at a random point covers each word's end with the same probability (systematic sampling,
Madow and Madow, 1944).

Letters: B rows, T tokens of a row, E parts of all rows, R rows with maskable tokens, K slots.

See docs/design/masking.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from terakoya.components import Batch
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.changing_rates import ChangingRate, largest_rate, rate_at
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


@dataclass(frozen=True)
class Masking:
    """Which words are masked, and what becomes of their tokens.

    Attributes:
        probability: of each word.
        budgeted: whether the budget rule chooses words, so that a row has nearly `probability` x maskable tokens
            masked; otherwise each word is chosen independently.
        replace: the shares of chosen tokens that become [MASK] and a random ordinary token; the others stay unchanged.
        largest_probability: takes the place of `probability` in the number of slots, for batches of one shape while
            the probability changes.
    """

    probability: float
    budgeted: bool = True
    replace: tuple[float, float] = (0.8, 0.1)
    largest_probability: float | None = None


def mask_rows(
    rows: Rows,
    vocabulary: Vocabulary,
    *,
    objective: str,
    probability: float | ChangingRate,
    whole_words: bool,
    budgeted: bool,
    replace: tuple[float, float],
) -> tuple[MaskedRows, Batch]:
    """Masks `rows` (B, T) by their keys, except special tokens; `objective` is the name in errors.

    The batch has `input_ids`, `position_ids`, `document_ids` (B, T), `masked_positions` (K,), indices into the
    flattened rows, and `masked_labels` (K,), -100 in unused slots; its counts are masked and tokens. A `probability`
    that changes has its value at `rows.progress`, and K is that of its largest value. The other arguments are as in
    `Masking`.
    """
    if vocabulary.mask is None:
        raise UserError(f"objective {objective}: the store's vocabulary has no [MASK]; use a tokenizer that has one")
    if whole_words and rows.word_starts is None:
        raise UserError(
            f"objective {objective}: whole_word_mask needs word starts, which this store does not have. Set "
            "objective.whole_word_mask to false, or prepare the store again with --words mecab, or with a tokenizer "
            "that knows words, such as mecab_wordpiece (if it comes from a plugin, prepare needs --plugin too)"
        )
    real = rows.document_ids >= 0
    masked = mask(
        rows.tokens,
        rows.word_starts if whole_words else None,
        real & ~vocabulary.is_special.take(rows.tokens),
        rows.keys,
        vocabulary,
        Masking(rate_at(probability, rows.progress), budgeted, replace, largest_rate(probability)),
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
    vocabulary: Vocabulary,
    how: Masking,
) -> MaskedRows:
    """Masks `tokens` (B, T) by the rows' `keys` (B,) uint64. Raises UserError if the vocabulary has no [MASK] or, with
    random replacements, no ordinary token.

    Only tokens where `maskable` (B, T) is True can be chosen. A word starts where `word_starts` (B, T) is True, and
    where the left neighbour is not maskable; without `word_starts` every token is a word.

    K is B x the smallest number that is at least round(probability x T), and at least 1, and holds all chosen tokens.
    What becomes of a chosen token is decided for each token.
    """
    if vocabulary.mask is None:
        raise UserError("masking: expected a vocabulary with a mask token, got none; use a tokenizer that has [MASK]")
    if how.replace[1] > 0 and not len(vocabulary.ordinary):
        raise UserError("masking: random replacements need ordinary tokens, got a vocabulary of special ones only")
    batch, width = tokens.shape
    stream = streams(keys, "mask")
    drawn = numbers(stream[:, None], np.arange(width)).reshape(-1)  # a word has the number of its first token
    edges = _edges(word_starts, maskable)
    if how.budgeted:
        chosen = _within_budget(drawn, edges, maskable, keys, how.probability)
    else:
        chosen = _words(bernoulli(drawn, how.probability), edges, maskable)
    starts = edges.take(chosen)
    lengths = edges.take(chosen + 1) - starts
    positions = np.repeat(starts - (lengths.cumsum() - lengths), lengths)
    positions += np.arange(len(positions))

    input_ids = tokens.astype(np.int64)
    flat = input_ids.reshape(-1)
    expected = int((how.largest_probability or how.probability) * width + 0.5)
    slots = batch * max(1, expected, -(-len(positions) // batch))
    padded, labels = np.zeros(slots, np.int64), np.full(slots, IGNORED, np.int64)
    padded[: len(positions)] = positions
    labels[: len(positions)] = flat.take(positions)
    second = drawn.take(positions) << np.uint64(32)  # the lower half: the choice of words has used the upper one
    masked = bernoulli(second, how.replace[0])
    flat[positions.compress(masked)] = vocabulary.mask
    if how.replace[1] > 0:
        random = np.flatnonzero(bernoulli(second, sum(how.replace)) & ~masked)
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
    drawn: np.ndarray, edges: np.ndarray, maskable: np.ndarray, keys: np.ndarray, probability: float
) -> np.ndarray:
    """Returns the numbers (n,), ascending, of the words that the budget rule masks; `drawn` (B * T,), `keys` (B,).

    The words with the smallest numbers usually fill the budget, so only those are sorted; rows that they do not fill
    are computed again with all of their words. Both ways choose the same words.
    """
    batch, width = maskable.shape
    row, first, budgets = _begin_budgets(edges, maskable, keys, probability)
    margin = 3 * (1.5 * probability * batch / max(1, len(edges))) ** 0.5
    early = bernoulli(drawn, probability + margin)
    early[edges.take(first)] = True
    chosen, unfilled = _fill(drawn, edges, _words(early, edges, maskable), first, row * width, budgets)
    if unfilled.any() and probability + margin < 1:
        row, first, budgets = row.compress(unfilled), first.compress(unfilled), budgets.compress(unfilled)
        again = np.zeros(batch, bool)
        again[row] = True
        chosen = chosen[~again[edges.take(chosen) // width]]
        words = _words(np.repeat(again, width), edges, maskable)
        chosen = np.sort(np.concatenate([chosen, _fill(drawn, edges, words, first, row * width, budgets)[0]]))
    return chosen


def _begin_budgets(
    edges: np.ndarray, maskable: np.ndarray, keys: np.ndarray, probability: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rows (R,) that have maskable tokens, and for each its first word (R,), the word of a random token,
    and its budget (R,) int64 from the beginning of this word."""
    batch, width = maskable.shape
    places = np.flatnonzero(maskable)
    begins = places.searchsorted(np.arange(0, batch * width + 1, width))
    counts = begins[1:] - begins[:-1]
    row = counts.nonzero()[0]
    counts = counts.take(row)
    point = streams(keys.take(row), "mask budget")  # one number a row is enough: a token, and a point in it
    token = places.take(begins.take(row) + integers_below(point, counts))
    first = edges.searchsorted(token, side="right") - 1
    point &= np.uint64(0xFFFFFFFF)
    budgets = (probability * counts + point * 2.0**-32).astype(np.int64)  # below: the tokens before the point count too
    return row, first, budgets + token - edges.take(first)


def _fill(
    drawn: np.ndarray,
    edges: np.ndarray,
    words: np.ndarray,
    first: np.ndarray,
    row_starts: np.ndarray,
    budgets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns those of `words` (n,), ascending, that fit into the budgets, and whether each row (R,) bool is unfilled.

    Args:
        words: of R rows, all or some.
        first: the first word of each row (R,), which is among `words`.
        row_starts: where the rows begin in the flattened (B, T), (R,).
        budgets: (R,) int64, in tokens.
    """
    starts = edges.take(words)
    sizes = edges.take(words + 1)
    sizes -= starts
    begins = starts.searchsorted(row_starts)
    ends = np.append(begins[1:], len(words))[: len(begins)]
    order = _in_order(drawn.take(starts), words.searchsorted(first), ends - begins)
    sizes = sizes.take(order)
    stops = sizes.cumsum()
    limits = stops.take(begins) - sizes.take(begins) + budgets  # words of earlier rows count too
    chosen = np.empty(len(words), bool)
    chosen[order] = stops <= np.repeat(limits, ends - begins)
    return words.compress(chosen), stops.take(ends - 1) < limits


def _in_order(drawn: np.ndarray, first: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the order (n,) of the words of R rows, which have `numbers` (R,) of words, one row after another: in each
    row the word `first` (R,), then the others by the upper 31 bits of `drawn` (n,); among equals the earlier comes
    first."""
    index_bits, random_bits, row_bits = 20, 31, 12
    row = np.arange(len(numbers), dtype=np.uint64)
    if len(drawn) > 1 << index_bits or len(row) > 1 << row_bits:
        priority = (drawn >> np.uint64(64 - random_bits)) + np.uint64(1)
        priority[first] = 0
        return np.lexsort((priority, np.repeat(row, numbers)))
    row <<= np.uint64(64 - row_bits)
    order = drawn >> np.uint64(64 - index_bits - random_bits)  # a number for each word: row, not first, random, index
    order &= np.uint64((1 << random_bits) - 1 << index_bits)
    order |= np.repeat(row | np.uint64(1 << index_bits + random_bits), numbers)
    order |= np.arange(len(drawn), dtype=np.uint64)
    order[first] = row | first.view(np.uint64)
    order.sort()
    order &= np.uint64((1 << index_bits) - 1)
    return order.view(np.int64)
