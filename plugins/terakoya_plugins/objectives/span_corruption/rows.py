"""From rows to the inputs and targets of an encoder-decoder: a pure function of rows and keys.

In a document of n tokens, framing aside, N of them give way in K spans. Of all ways to cut N tokens into K spans, and
to place these so that no two touch, each is equally likely: K - 1 of the N - 1 places inside the spans, and K of the
n - N + 1 places around the kept tokens, are those with the smallest draws.

Letters: B rows, T places of a row, S places of a target, D documents of all rows, R spans of all rows.
"""

from __future__ import annotations

import numpy as np

from terakoya.components.rows import Rows
from terakoya.toolkit.random_keys import draws

IGNORED = -100
"""The label of a place without a target."""


def amounts(lengths: np.ndarray, density: float, span_length: float) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens give way, in how many spans, (D,) int64 each, of documents with `lengths` (D,) tokens.

    At least one token does and one stays; a document of fewer than two tokens stays as it is.
    """
    noise = np.clip((lengths * density + 0.5).astype(np.int64), 1, np.maximum(lengths - 1, 1))
    noise = np.where(lengths < 2, 0, noise)
    spans = np.maximum(1, (noise / span_length + 0.5).astype(np.int64))
    return noise, np.where(noise > 0, np.minimum(spans, np.minimum(noise, lengths - noise + 1)), 0)


def corrupt(
    rows: Rows,
    real: np.ndarray,
    ordinary: np.ndarray,
    sentinels: np.ndarray,
    *,
    density: float,
    span_length: float,
    pad: int,
    end: int,
) -> dict[str, np.ndarray]:
    """`input_ids`, `position_ids`, `document_ids` (B, T), `decoder_input_ids`, `decoder_document_ids`, `labels` (B, S),
    all int64.

    `real` and `ordinary` (B, T) bool say which places are no padding and which hold no special token: those never give
    way, and split a span they lie in. Spans beyond the last of `sentinels` (n,) stay as they are.
    """
    batch, width = rows.tokens.shape
    edges = _edges(rows.document_ids)
    noise = _noise(rows, real, ordinary, edges, density, span_length)
    first = noise & ~np.concatenate([[False], noise[:-1]])
    number = first.cumsum() - 1  # of the span that a place belongs to, counted over all documents
    document = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, batch * width)))
    number -= (first.cumsum() - first)[edges][document]
    noise &= number < len(sentinels)
    first &= noise
    tokens, of_row = rows.tokens.reshape(-1).astype(np.int64), np.repeat(np.arange(batch), width)
    stand_in = sentinels[np.where(noise, number, 0)] if len(sentinels) else tokens

    kept = np.flatnonzero(real.reshape(-1) & (~noise | first))
    arrays = _filled(
        of_row[kept],
        {
            "input_ids": (np.where(first, stand_in, tokens)[kept], pad),
            "document_ids": (rows.document_ids.reshape(-1)[kept].astype(np.int64), -1),
            "position_ids": (_rank(document[kept]), 0),
        },
        (batch, width),
    )
    # What the decoder writes: at each place that gave way its token, before a span's first the sentinel, and after a
    # document's last the end.
    gone = np.flatnonzero(noise)
    last = np.append(document[gone][1:] != document[gone][:-1], True)[: len(gone)]
    place = np.repeat(np.arange(len(gone)), 1 + first[gone] + last)
    ordinal = _rank(place) - first[gone][place]  # -1 sentinel, 0 token, 1 end
    labels = np.where(ordinal < 0, stand_in[gone][place], np.where(ordinal > 0, end, tokens[gone][place]))
    begins = np.append(True, last[place][:-1] & (ordinal[:-1] > 0))[: len(place)]
    inputs = np.where(begins, pad, np.append(pad, labels[:-1])[: len(labels)])
    owner = of_row[gone][place]
    longest = int(np.bincount(owner, minlength=batch).max())
    return arrays | _filled(
        owner,
        {
            "decoder_input_ids": (inputs, pad),
            "decoder_document_ids": (rows.document_ids.reshape(-1)[gone][place].astype(np.int64), -1),
            "labels": (labels, IGNORED),
        },
        (batch, max(8, -(-longest // 8) * 8)),
    )


def _edges(document_ids: np.ndarray) -> np.ndarray:
    """Where documents, and each row's padding, start in the flattened rows, (D,) int64."""
    starts = np.ones(document_ids.shape, bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return np.flatnonzero(starts)


def _noise(
    rows: Rows, real: np.ndarray, ordinary: np.ndarray, edges: np.ndarray, density: float, span_length: float
) -> np.ndarray:
    """Which places of the flattened rows give way, (B * T,) bool."""
    batch, width = rows.tokens.shape
    flat = ordinary.reshape(-1)
    sizes = np.diff(np.append(edges, batch * width)) * real.reshape(-1)[edges]
    # a document's body: from its first to its last ordinary token
    before = np.append(0, flat.cumsum())
    some = before[edges + sizes] > before[edges]
    at = np.flatnonzero(flat)
    start = np.where(some, at[np.minimum(before[edges], len(at) - 1)] if len(at) else 0, 0)
    stop = np.where(some, at[before[edges + sizes] - 1] + 1 if len(at) else 0, 0)
    gone, spans = amounts(stop - start, density, span_length)

    row, column = np.divmod(start, width)
    keys = rows.keys[row]
    lengths = _smallest(keys, "span lengths", column, np.maximum(gone - 1, 0), np.maximum(spans - 1, 0)) + 1
    places = _smallest(keys, "span places", column, np.where(spans > 0, stop - start - gone + 1, 0), spans)
    owner = np.repeat(np.arange(len(edges)), spans)
    leading = _rank(owner) == 0
    inside = np.zeros(len(owner), np.int64)  # tokens in the document's earlier spans
    inside[~leading] = lengths
    final = np.append(leading[1:], True)[: len(owner)]
    until = np.where(final, gone[owner], np.append(inside[1:], 0)[: len(owner)])
    begin = start[owner] + places + inside
    mark = np.zeros(batch * width + 1, np.int64)
    np.add.at(mark, begin, 1)
    np.add.at(mark, begin + until - inside, -1)
    return (mark.cumsum()[:-1] > 0) & flat


def _smallest(
    keys: np.ndarray, purpose: str, column: np.ndarray, candidates: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """For each of D documents the `wanted` (D,) numbers below `candidates` (D,) with the smallest draws, ascending; one
    document after another, (sum of wanted,) int64. Number i draws at the row's place `column` (D,) + i."""
    owner = np.repeat(np.arange(len(candidates)), candidates)
    number = _rank(owner)
    drawn = draws(keys[owner], purpose, column[owner] + number)
    order = np.lexsort((drawn, owner))  # keeps documents together, so that owner[order] is owner
    return number[np.sort(order[number < wanted[owner]])]


def _rank(groups: np.ndarray) -> np.ndarray:
    """The number of each item among its neighbours of the same group, (n,) int64."""
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])[: len(groups)])
    return np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))


def _filled(
    row: np.ndarray, values: dict[str, tuple[np.ndarray, int]], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Arrays of `shape`, the values (n,) of each `row` (n,) from the left, the number beside them behind."""
    column, arrays = _rank(row), {}
    for name, (items, empty) in values.items():
        arrays[name] = np.full(shape, empty, np.int64)
        arrays[name][row, column] = items
    return arrays
