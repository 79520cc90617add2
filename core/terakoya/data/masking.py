"""Masking for masked language models (Devlin et al., 2018), by whole words or tokens: a pure function of rows and keys.

The budget rule: in each row the words are put in the order of their draws; going through them, a word is taken if the
row's budget still holds it and skipped if it would overshoot, until the budget is spent or the words are.

Letters: B rows, T tokens of a row, W words of all rows, C candidates of a row, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from terakoya.data.keys import below, chance, numbers, streams
from terakoya.data.vocab import Vocabulary
from terakoya.errors import UserError

IGNORED = -100
"""The label of a slot that is not used: what torch's cross entropy ignores."""
_POSITION_BITS = 20


@dataclass(frozen=True)
class Masked:
    """A masked batch.

    Attributes:
        input_ids: (B, T) int64, the tokens with replacements.
        positions: (K,) int64, indices into the flattened (B * T) batch, ascending; 0 in unused slots, which come last.
        labels: (K,) int64, the original tokens there; -100 in unused slots.
        count: used slots.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    count: int


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
) -> Masked:
    """Masks `tokens` (B, T) by the rows' `keys` (B,) uint64.

    Only tokens where `maskable` (B, T) is True can be chosen. A word starts where `word_starts` (B, T) says so, and
    where the left neighbour is not maskable; without `word_starts` every token is a word.

    `budgeted`: each row's budget is round(probability x maskable tokens), halves up and at least 1; K is
    B x round(probability x T). A row whose every word is longer than its budget has nothing masked. Otherwise each
    word is chosen with `probability` by itself, and K grows beyond that where a batch needs it.

    `replace`: of the chosen tokens, the shares that become [MASK] and a random ordinary token; the rest stay as they
    are. Decided for each token, or with `per_word` for each word.

    Raises UserError if the vocabulary has no [MASK] or, with random replacements, no ordinary token.
    """
    if vocabulary.mask is None:
        raise UserError("masking: expected a vocabulary with a mask token, got none; use a tokenizer that has [MASK]")
    if replace[1] > 0 and not len(vocabulary.ordinary):
        raise UserError("masking: random replacements need ordinary tokens, got a vocabulary of special ones only")
    batch, width = tokens.shape
    assert width <= 1 << _POSITION_BITS, "positions of a row share a sort key with its draws"
    assert tokens.size < 1 << 31, "positions of a batch are int32"
    stream = streams(keys, "mask")
    starts, bounds = words(word_starts, maskable)
    row = starts // width  # not divmod: division by one number alone is vectorised
    drawn = numbers(stream.take(row), starts - row * width)
    if budgeted:
        budgets = np.maximum(1, _round(probability * np.count_nonzero(maskable, axis=1)))
        chosen = _within_budget(row, drawn, bounds, budgets, probability)
    else:
        chosen = np.flatnonzero(chance(drawn, probability))
    lengths = bounds[chosen + 1] - bounds[chosen]
    owners = np.repeat(starts[chosen], lengths)
    positions = np.arange(len(owners))
    positions += np.repeat(starts[chosen] - lengths.cumsum() + lengths, lengths)

    input_ids = tokens.astype(np.int64)
    flat = input_ids.reshape(-1)
    slots = max(batch * max(1, _round(probability * width)), len(positions))
    padded, labels = np.zeros(slots, np.int64), np.full(slots, IGNORED, np.int64)
    padded[: len(positions)] = positions
    labels[: len(positions)] = flat[positions]

    row = positions // width
    column = positions - row * width + (1 << _POSITION_BITS)  # beyond the draws that chose
    fresh = numbers(stream.take(row), column)
    decision = numbers(stream[row], column - positions + owners) if per_word else fresh
    replacements = labels[: len(positions)].copy()
    if replace[1] > 0:
        random = vocabulary.ordinary.take(below(fresh << np.uint64(32), len(vocabulary.ordinary)))  # the lower half
        np.copyto(replacements, random, where=chance(decision, sum(replace)))
    replacements[chance(decision, replace[0])] = vocabulary.mask
    flat[positions] = replacements
    return Masked(input_ids, padded, labels, len(positions))


def words(word_starts: np.ndarray | None, maskable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words of (B, T) arrays of bool: starts (W,) int32, their places in the flattened batch, and bounds (W + 1,)
    int32, so that word w is the maskable tokens number bounds[w] to bounds[w + 1].

    Every maskable token is in exactly one word; the tokens of a word are adjacent.
    """
    if word_starts is None:
        starts = np.flatnonzero(maskable).astype(np.int32)
        return starts, np.arange(len(starts) + 1, dtype=np.int32)
    begins = word_starts.copy()
    begins[:, 0] = True
    begins[:, 1:] |= ~maskable[:, :-1]
    begins &= maskable
    starts = np.flatnonzero(begins).astype(np.int32)
    before = np.cumsum(maskable, dtype=np.int32)  # with the place itself
    bounds = np.empty(len(starts) + 1, np.int32)
    np.subtract(before.take(starts), 1, out=bounds[:-1])
    bounds[-1] = before[-1]
    return starts, bounds


def _within_budget(
    row: np.ndarray, drawn: np.ndarray, bounds: np.ndarray, budgets: np.ndarray, probability: float
) -> np.ndarray:
    """The chosen words (n,), ascending, by the budget rule, of words in `row` (W,) with draws `drawn` (W,).

    The words with the smallest draws usually fill the budget, so only those are sorted; rows they do not fill are
    done again with all of their words. Both ways choose the same words.
    """
    margin = 3.5 * (1.5 * probability * len(budgets) / max(1, len(row))) ** 0.5
    early = np.flatnonzero(chance(drawn, probability + margin))
    lengths = bounds[1:] - bounds[:-1]
    chosen, unfilled = _greedy(row.take(early), drawn.take(early), lengths.take(early), budgets)
    chosen = early[chosen]
    if unfilled.any() and len(early) < len(row):
        chosen = chosen[~unfilled[row[chosen]]]
        again = np.flatnonzero(unfilled[row])
        more, _ = _greedy(row[again], drawn[again], lengths[again], budgets)
        chosen = np.concatenate([chosen, again[more]])
    chosen.sort()
    return chosen


def _greedy(
    row: np.ndarray, drawn: np.ndarray, lengths: np.ndarray, budgets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The words (n,) that the budget rule takes from words in row order, and the rows (B,) bool left unfilled.

    Words are ordered by the upper bits of their draws; of equals the earlier word comes first.
    """
    counts = np.bincount(row, minlength=len(budgets))
    width = int(counts.max(initial=0))
    if width == 0:
        return np.empty(0, np.int64), np.ones(len(budgets), bool)
    first = np.cumsum(counts) - counts
    number = np.arange(len(row))
    number -= first.take(row)
    low = np.uint64((1 << _POSITION_BITS) - 1)
    order_keys = np.full(len(budgets) * width, ~np.uint64(0))
    order_keys[row * width + number] = drawn & ~low | number.view(np.uint64)
    ordered = order_keys.reshape(len(budgets), width)
    ordered.sort(axis=1)
    ordered &= low
    index = ordered.view(np.int64)
    index += first[:, None]
    sizes = lengths.take(index, mode="clip")
    sizes[np.arange(width) >= counts[:, None]] = 1 << _POSITION_BITS  # not there: fits nowhere
    total = sizes.cumsum(axis=1)
    taken = total <= budgets[:, None]
    until = np.count_nonzero(taken, axis=1)
    left = budgets.copy()
    some = np.flatnonzero(until)
    left[some] -= total[some, until[some] - 1]
    for behind in np.flatnonzero(left).tolist():  # past the word that overshot, whatever still fits
        room, at = int(left[behind]), int(until[behind]) + 1
        while room and at < counts[behind]:
            for place, size in enumerate(sizes[behind, at : at + 16].tolist(), at):
                if size <= room:
                    taken[behind, place] = True
                    room -= size
                    if not room:
                        break
            at += 16
        left[behind] = room
    return index[taken], left > 0


def _round(number: float | np.ndarray) -> np.ndarray | int:
    """To the nearest integer, halves up."""
    rounded = np.floor(np.asarray(number) + 0.5).astype(np.int64)
    return rounded if rounded.ndim else int(rounded)
