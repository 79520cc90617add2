"""Next-sentence pairs against the original's rules in plain loops."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import CLS, FIRST, SEP, small_store

from terakoya.components.rows import Layout
from terakoya.rows.next_sentence_pairs import PairPlan, plan_pairs, truncate_pairs
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.random_keys import bernoulli, draws, integers_below, row_keys

DOCUMENTS = st.lists(st.lists(st.integers(1, 30), max_size=9), min_size=2, max_size=9).filter(
    lambda documents: sum(bool(lines) for lines in documents) >= 2
)


def plan_of(documents: list[list[int]], *, epoch: int = 0, budget: int = 29, short: float = 0.1) -> PairPlan:
    lengths = [length for lines in documents for length in lines]
    stops = np.cumsum(lengths).astype(np.int64)
    first = np.concatenate([[0], np.cumsum([len(lines) for lines in documents])]).astype(np.int64)
    return plan_pairs(
        stops - lengths,
        stops,
        first,
        budget=budget,
        short_sequence_probability=short,
        random_next_probability=0.5,
        keys_of=partial(row_keys, 1, epoch, 0),
    )


def slow_pairs(documents: list[list[int]], *, epoch: int, budget: int, short: float) -> list[tuple[int, ...]]:
    """The original's create_instances_from_document in plain loops, with keyed draws."""

    def draw(document: int, purpose: str, turn: int) -> np.ndarray:
        return draws(row_keys(1, epoch, 0, np.array([document])), purpose, np.array([turn]))

    starts: list[list[int]] = []
    at = 0
    for lines in documents:
        starts.append([])
        for length in lines:
            starts[-1].append(at)
            at += length
    full = [number for number, lines in enumerate(documents) if lines]
    pairs = []
    for document in full:
        lines = documents[document]
        target = budget
        if bernoulli(draw(document, "pairs short", 0), short)[0]:
            target = 2 + int(integers_below(draw(document, "pairs target", 0), budget - 1)[0])
        line = turn = 0
        while line < len(lines):
            chunk = [line]
            while sum(lines[each] for each in chunk) < target and chunk[-1] + 1 < len(lines):
                chunk.append(chunk[-1] + 1)
            a_lines = 1
            if len(chunk) > 1:
                a_lines += int(integers_below(draw(document, "pairs cut", turn), len(chunk) - 1)[0])
            a = chunk[:a_lines]
            a_length = sum(lines[each] for each in a)
            random = len(chunk) == 1 or bool(bernoulli(draw(document, "pairs random", turn), 0.5)[0])
            if random:
                others = [each for each in full if each != document]
                other = others[int(integers_below(draw(document, "pairs document", turn), len(others))[0])]
                b = [int(integers_below(draw(document, "pairs line", turn), len(documents[other]))[0])]
                while sum(documents[other][each] for each in b) < target - a_length and b[-1] + 1 < len(
                    documents[other]
                ):
                    b.append(b[-1] + 1)
                line += a_lines
            else:
                other, b = document, chunk[a_lines:]
                line += len(chunk)
            b_length = sum(documents[other][each] for each in b)
            pairs.append((starts[document][a[0]], starts[other][b[0]], a_length, b_length, int(random)))
            turn += 1
    return pairs


@settings(max_examples=50)
@given(DOCUMENTS, st.integers(0, 5), st.integers(4, 60), st.sampled_from([0.0, 0.1, 1.0]))
def test_the_plan_equals_the_original(documents: list[list[int]], epoch: int, budget: int, short: float) -> None:
    plan = plan_of(documents, epoch=epoch, budget=budget, short=short)
    got = np.concatenate([plan.starts, plan.lengths, plan.random[:, None]], axis=1)
    assert [tuple(row) for row in got.tolist()] == slow_pairs(documents, epoch=epoch, budget=budget, short=short)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=20), st.integers(2, 120))
def test_truncation_shortens_the_longer_segment(lengths: list[tuple[int, int]], budget: int) -> None:
    starts = np.tile([1000, 5000], (len(lengths), 1))
    new, kept = truncate_pairs(starts, np.array(lengths), budget, row_keys(0, 0, 0, np.arange(len(lengths))))
    for (a, b), got, begin in zip(lengths, kept.tolist(), (new - starts).tolist(), strict=True):
        removed_a = removed_b = 0
        while a - removed_a + b - removed_b > budget:
            if a - removed_a > b - removed_b:
                removed_a += 1
            else:
                removed_b += 1
        assert got == [a - removed_a, b - removed_b]
        assert 0 <= begin[0] <= removed_a and 0 <= begin[1] <= removed_b


def test_truncation_shortens_both_ends_equally() -> None:
    keys = row_keys(0, 0, 0, np.arange(4000))
    new, kept = truncate_pairs(np.zeros((4000, 2), int), np.tile([150, 30], (4000, 1)), 60, keys)
    assert np.all(kept == 30)
    fronts = new[:, 0]
    assert np.all(new[:, 1] == 0)
    assert abs(fronts.mean() - 60) < 0.5 and abs(fronts.var() - 30) < 3, "120 fair coins"


def test_labels_and_special_tokens(tmp_path: Path) -> None:
    documents = [[(7 * d + 3 * n) % 9 + 1 for n in range(12)] for d in range(60)]
    store = small_store(tmp_path, documents)
    source = RowSource(store, Layout("pairs"), sequence_length=32, seed=3)  # type: ignore[arg-type]
    document_of = np.repeat(np.arange(60), [sum(lines) for lines in documents])
    rows = source.load(0, np.arange(len(source)))
    assert rows.next_sentence is not None and rows.token_type_ids is not None
    for row, ids, types, positions, random in zip(
        rows.tokens, rows.document_ids, rows.token_type_ids, rows.position_ids, rows.next_sentence, strict=True
    ):
        used = int(np.sum(ids == 0))
        assert used <= 32 and set(ids[used:].tolist()) <= {-1}
        assert positions[:used].tolist() == list(range(used))
        first, second = np.flatnonzero(row == SEP).tolist()
        assert row[0] == CLS and second == used - 1
        assert types[:used].tolist() == [0] * (first + 1) + [1] * (second - first)
        a, b = row[1:first], row[first + 1 : second]
        assert np.all(np.diff(a) == 1) and np.all(np.diff(b) == 1)
        assert len(set(document_of[a - FIRST])) == len(set(document_of[b - FIRST])) == 1
        assert (document_of[a[0] - FIRST] == document_of[b[0] - FIRST]) == (random == 0)
    assert 0.4 < rows.next_sentence.mean() < 0.7
    held = np.unique(rows.tokens[rows.tokens >= FIRST])
    assert len(held) > 0.95 * len(store.tokens), "leftover lines are used again"


def test_epochs_have_new_pairs_and_the_same_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = small_store(tmp_path, [[(7 * d + n) % 9 + 1 for n in range(12)] for d in range(60)])
    source = RowSource(store, Layout("pairs"), sequence_length=32, seed=3)  # type: ignore[arg-type]
    with caplog.at_level("INFO", "terakoya"):
        epochs = [source.load(epoch, np.arange(len(source))) for epoch in range(4)]
    assert all(len(rows) == len(source) for rows in epochs)
    assert len({rows.tokens.tobytes() for rows in epochs}) == 4
    assert caplog.text.count("pairs; the run takes") == 3
