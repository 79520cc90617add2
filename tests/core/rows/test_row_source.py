"""Rows: every token once an epoch, with special tokens, isolated documents, the same rows for any split."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import CLS, FIRST, PAD, SEP, SmallStore, small_store

from terakoya.components.rows import Layout, Rows
from terakoya.errors import UserError
from terakoya.rows.row_source import RowSource

DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=2, max_size=12)
EOS = 5


def source_of(store: SmallStore, kind: str, length: int = 16, **options: object) -> RowSource:
    return RowSource(store, Layout(kind), sequence_length=length, seed=42, **options)  # type: ignore[arg-type]


def epoch_of(source: RowSource, epoch: int = 0) -> Rows:
    return source.load(epoch, np.arange(len(source)))


def check_arrays(rows: Rows, length: int) -> None:
    """Asserts what holds in every layout."""
    real = rows.document_ids >= 0
    assert rows.tokens.dtype == rows.document_ids.dtype == rows.position_ids.dtype == np.int32
    assert np.all(real == (np.cumsum(~real, axis=1) == 0)), "padding comes last"
    assert np.all((rows.tokens == PAD) == ~real)
    assert np.all(rows.position_ids[~real] == 0)
    assert rows.tokens.shape[1] <= length
    assert rows.word_starts is not None
    assert np.array_equal(rows.word_starts, (rows.tokens >= FIRST) & (rows.tokens % 2 == 0))
    assert len(set(rows.keys.tolist())) == len(rows)


@settings(max_examples=40)
@given(DOCUMENTS, st.sampled_from(["line", "document"]), st.sampled_from([None, EOS]), st.integers(0, 3))
def test_packed(documents: list[list[int]], unit: str, eos: int | None, epoch: int) -> None:
    with TemporaryDirectory() as folder:
        store = small_store(Path(folder), documents, unit=unit, eos=eos)
        rows = epoch_of(source_of(store, "packed"), epoch)
    check_arrays(rows, 16)
    assert rows.tokens.shape[1] == 16
    ordinary = rows.tokens[rows.tokens >= FIRST]
    count = sum(map(sum, documents))
    assert np.array_equal(np.sort(ordinary), FIRST + np.arange(count)), "each token exactly once"
    document_of = np.repeat(np.arange(len(documents)), [sum(lines) for lines in documents])
    for row, ids, positions in zip(rows.tokens, rows.document_ids, rows.position_ids, strict=True):
        assert sorted(set(ids.tolist()) - {-1}) == list(range(ids.max() + 1))
        for number in range(ids.max() + 1):
            columns = np.flatnonzero(ids == number)
            assert np.array_equal(columns, np.arange(columns[0], columns[-1] + 1))
            assert positions[columns].tolist() == list(range(len(columns)))
            piece = row[columns]
            assert piece[0] == CLS and piece[-1] == SEP
            assert len(piece) > 2 and np.all(np.diff(piece[1:-1]) == 1)
            assert len(set(document_of[piece[1:-1] - FIRST].tolist())) == 1, "one document a piece"


@settings(max_examples=40)
@given(DOCUMENTS, st.sampled_from(["line", "document"]), st.sampled_from([None, EOS]))
def test_stream(documents: list[list[int]], unit: str, eos: int | None) -> None:
    stream: list[int] = []
    following = FIRST
    for lines in documents:
        stream += [*range(following, following + sum(lines)), SEP]
        following += sum(lines)
    expected = [[CLS, *stream[at : at + 14], SEP] for at in range(0, len(stream), 14)]
    expected[-1] += [PAD] * (16 - len(expected[-1]))
    with TemporaryDirectory() as folder:
        store = small_store(Path(folder), documents, unit=unit, eos=eos)
        rows = epoch_of(source_of(store, "stream", shuffle=False))
    check_arrays(rows, 16)
    assert rows.tokens.tolist() == expected
    assert set(rows.document_ids.ravel().tolist()) <= {0, -1}
    real = rows.document_ids >= 0
    assert np.array_equal(rows.position_ids[real], np.broadcast_to(np.arange(16), rows.tokens.shape)[real])


@settings(max_examples=30)
@given(DOCUMENTS, st.sampled_from([None, EOS]))
def test_lines(documents: list[list[int]], eos: int | None) -> None:
    expected: list[list[int]] = []
    following = FIRST
    for length in [length for lines in documents for length in lines]:
        for at in range(0, length, 14):
            expected.append([CLS, *range(following + at, following + min(at + 14, length)), SEP])
        following += length
    with TemporaryDirectory() as folder:
        source = source_of(small_store(Path(folder), documents, eos=eos), "lines", shuffle=False)
        rows = epoch_of(source)
        check_arrays(rows, 16)
        assert [row[row != PAD].tolist() for row in rows.tokens] == expected
        one = source.load(0, np.array([0]))
    assert one.tokens.shape == (1, min(16, -(-len(expected[0]) // 8) * 8)), "trimmed to the longest row"


@pytest.mark.parametrize("kind", ["packed", "stream", "lines", "pairs"])
def test_any_part_of_an_epoch_is_the_same_rows(tmp_path: Path, kind: str) -> None:
    documents = [[(7 * d + 3 * n) % 25 + 1 for n in range(d % 5 + 1)] for d in range(40)]
    source = source_of(small_store(tmp_path, documents), kind)
    for epoch in (0, 3):
        whole = epoch_of(source, epoch)
        again = source_of(small_store(tmp_path, documents), kind)
        for start in range(0, len(source), 5):
            part = again.load(epoch, np.arange(start, min(start + 5, len(source))))
            width = part.tokens.shape[1]
            assert np.array_equal(part.tokens, whole.tokens[start : start + 5, :width])
            assert np.all(whole.document_ids[start : start + 5, width:] == -1)
            assert np.array_equal(part.keys, whole.keys[start : start + 5])
            assert np.array_equal(part.document_ids, whole.document_ids[start : start + 5, :width])


def test_epochs_and_seeds_and_stores_differ_in_order_and_keys(tmp_path: Path) -> None:
    store = small_store(tmp_path, [[5]] * 60)
    first = source_of(store, "lines", store_id=0)
    epochs = [epoch_of(first, 0), epoch_of(first, 1), epoch_of(source_of(store, "lines", store_id=1))]
    epochs.append(
        epoch_of(RowSource(store, Layout("lines"), sequence_length=16, seed=43))  # type: ignore[arg-type]
    )
    orders = [rows.tokens[:, 1].tolist() for rows in epochs]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({key for rows in epochs for key in rows.keys.tolist()}) == 240


def test_without_shuffling_rows_are_in_plan_order(tmp_path: Path) -> None:
    source = source_of(small_store(tmp_path, [[5]] * 60), "lines", shuffle=False)
    assert np.all(np.diff(epoch_of(source).tokens[:, 1]) > 0)


def test_a_store_without_words(tmp_path: Path) -> None:
    assert epoch_of(source_of(small_store(tmp_path, [[5], [6]], words=False), "packed")).word_starts is None


@pytest.mark.parametrize("kind", ["packed", "stream", "lines", "pairs"])
def test_a_blank_row_has_nothing_to_learn(tmp_path: Path, kind: str) -> None:
    blank = source_of(small_store(tmp_path, [[5], [6]]), kind).blank_row()
    real = blank.tokens[blank.document_ids >= 0]
    assert real.tolist() == [CLS, SEP]
    assert (blank.next_sentence is None) == (blank.token_type_ids is None) == (kind != "pairs")
    if blank.next_sentence is not None:
        assert blank.next_sentence.tolist() == [-100]


@pytest.mark.parametrize("kind", ["lines", "pairs"])
def test_layouts_of_lines_refuse_a_store_of_documents(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match="--unit line"):
        source_of(small_store(tmp_path, [[5], [6]], unit="document"), kind)


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path / "a", [[5], [6]])
    with pytest.raises(UserError, match="sequence_length"):
        source_of(store, "packed", 2)
    with pytest.raises(UserError, match="two documents"):
        source_of(small_store(tmp_path / "b", [[5, 6]]), "pairs")
    with pytest.raises(UserError, match="empty"):
        source_of(small_store(tmp_path / "c", [[], []], words=False), "packed")
    store.facts.vocabulary = store.facts.vocabulary.model_copy(update={"cls": None})
    with pytest.raises(UserError, match="cls"):
        source_of(store, "packed")
