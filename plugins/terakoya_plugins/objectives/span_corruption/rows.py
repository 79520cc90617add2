"""Span corruption of rows: the inputs and targets of an encoder-decoder, a pure function of rows and keys.

In a document of n tokens without special tokens, K spans with N tokens in all are replaced. All ways to divide N tokens
into K spans, and to place the spans so that no two touch, are equally likely: K - 1 of the N - 1 borders inside the
spans, and K of the n - N + 1 gaps around the kept tokens, are those with the smallest draws.

Letters: B rows, T positions of a row, S positions of a target, D documents of all rows, R spans of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from terakoya.components.rows import Rows
from terakoya.toolkit.masking import IGNORED
from terakoya.toolkit.random_keys import draws


@dataclass(frozen=True)
class Noising:
    """How rows are corrupted. Spans of a document after the last of `sentinels` (n,) stay as they are."""

    density: float
    span_length: float
    sentinels: np.ndarray
    pad: int
    end: int


def noise_and_spans(lengths: np.ndarray, density: float, span_length: float) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of replaced tokens and of spans, (D,) int64 each, in documents with `lengths` (D,) tokens.

    At least one token is replaced and at least one stays; a document of fewer than two tokens stays as it is.
    """
    noise = np.clip((lengths * density + 0.5).astype(np.int64), 1, np.maximum(lengths - 1, 1))
    noise = np.where(lengths < 2, 0, noise)
    spans = np.maximum(1, (noise / span_length + 0.5).astype(np.int64))
    return noise, np.where(noise > 0, np.minimum(spans, np.minimum(noise, lengths - noise + 1)), 0)


def corrupt(rows: Rows, ordinary: np.ndarray, noising: Noising) -> dict[str, np.ndarray]:
    """`input_ids`, `position_ids`, `document_ids` (B, T), `decoder_input_ids`, `decoder_document_ids`, `labels` (B, S),
    all int64.

    `ordinary` (B, T) bool is False at special tokens, which are never replaced and split a span around them.
    """
    batch, width = rows.tokens.shape
    real, sentinels, pad = rows.document_ids >= 0, noising.sentinels, noising.pad
    edges = _document_edges(rows.document_ids)
    noise = _select_noise(rows, ordinary, edges, noising)
    first = noise & ~np.concatenate([[False], noise[:-1]])
    number = first.cumsum() - 1  # of the position's span, counted over all documents
    document = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, batch * width)))
    number -= (first.cumsum() - first)[edges][document]
    noise &= number < len(sentinels)
    first &= noise
    tokens, of_row = rows.tokens.reshape(-1).astype(np.int64), np.repeat(np.arange(batch), width)
    sentinel = sentinels[np.where(noise, number, 0)] if len(sentinels) else tokens

    kept = np.flatnonzero(real.reshape(-1) & (~noise | first))
    arrays = _fill_rows(
        of_row[kept],
        {
            "input_ids": (np.where(first, sentinel, tokens)[kept], pad),
            "document_ids": (rows.document_ids.reshape(-1)[kept].astype(np.int64), -1),
            "position_ids": (_rank(document[kept]), 0),
        },
        (batch, width),
    )
    # The decoder's targets: each replaced token, before the first token of a span its sentinel, and after the last
    # replaced token of a document the end token.
    replaced = np.flatnonzero(noise)
    last = np.append(document[replaced][1:] != document[replaced][:-1], True)[: len(replaced)]
    source = np.repeat(np.arange(len(replaced)), 1 + first[replaced] + last)
    ordinal = _rank(source) - first[replaced][source]  # -1 sentinel, 0 token, 1 end
    labels = np.where(
        ordinal < 0, sentinel[replaced][source], np.where(ordinal > 0, noising.end, tokens[replaced][source])
    )
    begins = np.append(True, last[source][:-1] & (ordinal[:-1] > 0))[: len(source)]
    inputs = np.where(begins, pad, np.append(pad, labels[:-1])[: len(labels)])
    owner = of_row[replaced][source]
    longest = int(np.bincount(owner, minlength=batch).max())
    return arrays | _fill_rows(
        owner,
        {
            "decoder_input_ids": (inputs, pad),
            "decoder_document_ids": (rows.document_ids.reshape(-1)[replaced][source].astype(np.int64), -1),
            "labels": (labels, IGNORED),
        },
        (batch, max(8, -(-longest // 8) * 8)),
    )


def _document_edges(document_ids: np.ndarray) -> np.ndarray:
    """The starts of documents, and of each row's padding, in the flattened rows, (D,) int64."""
    starts = np.ones(document_ids.shape, bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return np.flatnonzero(starts)


def _select_noise(rows: Rows, ordinary: np.ndarray, edges: np.ndarray, noising: Noising) -> np.ndarray:
    """Which positions of the flattened rows are replaced, (B * T,) bool."""
    batch, width = rows.tokens.shape
    flat = ordinary.reshape(-1)
    sizes = np.diff(np.append(edges, batch * width)) * (rows.document_ids.reshape(-1)[edges] >= 0)
    # A document's body is the range from its first to its last ordinary token.
    before = np.append(0, flat.cumsum())
    has_body = before[edges + sizes] > before[edges]
    positions = np.flatnonzero(flat)
    start = np.where(has_body, positions[np.minimum(before[edges], len(positions) - 1)] if len(positions) else 0, 0)
    stop = np.where(has_body, positions[before[edges + sizes] - 1] + 1 if len(positions) else 0, 0)
    noise, spans = noise_and_spans(stop - start, noising.density, noising.span_length)

    row, column = np.divmod(start, width)
    keys = rows.keys[row]
    lengths = _smallest(keys, "span lengths", column, np.maximum(noise - 1, 0), np.maximum(spans - 1, 0)) + 1
    gaps = _smallest(keys, "span places", column, np.where(spans > 0, stop - start - noise + 1, 0), spans)
    owner = np.repeat(np.arange(len(edges)), spans)
    leading = _rank(owner) == 0
    earlier = np.zeros(len(owner), np.int64)  # tokens in the document's earlier spans
    earlier[~leading] = lengths
    final = np.append(leading[1:], True)[: len(owner)]
    until = np.where(final, noise[owner], np.append(earlier[1:], 0)[: len(owner)])
    begin = start[owner] + gaps + earlier
    mark = np.zeros(batch * width + 1, np.int64)
    np.add.at(mark, begin, 1)
    np.add.at(mark, begin + until - earlier, -1)
    return (mark.cumsum()[:-1] > 0) & flat


def _smallest(
    keys: np.ndarray, purpose: str, column: np.ndarray, candidates: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """For each of D documents the `counts` (D,) numbers below `candidates` (D,) with the smallest draws, ascending; one
    document after another, (sum of counts,) int64. The draw of number i is at the row's position `column` (D,) + i."""
    owner = np.repeat(np.arange(len(candidates)), candidates)
    number = _rank(owner)
    drawn = draws(keys[owner], purpose, column[owner] + number)
    order = np.lexsort((drawn, owner))  # keeps documents together, so that owner[order] is owner
    return number[np.sort(order[number < counts[owner]])]


def _rank(groups: np.ndarray) -> np.ndarray:
    """The number of each item among its neighbours of the same group, (n,) int64."""
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])[: len(groups)])
    return np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))


def _fill_rows(
    row: np.ndarray, values: dict[str, tuple[np.ndarray, int]], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Arrays of `shape`: by name, the values (n,) of each `row` (n,) from the left, then the fill value."""
    column, arrays = _rank(row), {}
    for name, (items, fill) in values.items():
        arrays[name] = np.full(shape, fill, np.int64)
        arrays[name][row, column] = items
    return arrays
