"""Causal rows: every token is a label exactly once, after the tokens that precede it in its document."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import FIRST, PAD, SEP, SmallStore, small_store

from terakoya.components.rows import Layout, Rows
from terakoya.errors import UserError
from terakoya.rows.causal_rows import IGNORED
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource

DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=12)
EOS, BOS = 5, 6
LENGTH = 16


def store_of(folder: Path, documents: list[list[int]], **further: Any) -> SmallStore:
    """A store whose vocabulary has beginning- and end-of-sequence tokens, without word starts."""
    store = small_store(folder, documents, words=False, **further)
    store.facts.vocabulary = store.facts.vocabulary.model_copy(update={"eos": EOS, "bos": BOS})
    return store


def rows_of(store: SmallStore, kind: str, epoch: int = 0, *, shuffle: bool = False, **layout: Any) -> Rows:
    source = RowSource(
        store, Layout(kind, framing="causal", **layout), sequence_length=LENGTH, seed=42, shuffle=shuffle  # type: ignore[arg-type]
    )  # fmt: skip
    return source.load(epoch, np.arange(len(source)))


def texts(documents: list[list[int]], *, bos: bool = False, end: bool = True) -> list[list[int]]:
    """Each document as a sequence of ids."""
    result, following = [], FIRST
    for lines in documents:
        ids = list(range(following, following + sum(lines)))
        following += sum(lines)
        result.append([BOS] * bos + ids + [EOS] * end)
    return result


def check_arrays(rows: Rows) -> None:
    """Asserts what holds in every layout."""
    assert rows.labels is not None and rows.word_starts is None
    arrays = (rows.tokens, rows.document_ids, rows.position_ids, rows.labels)
    assert all(array.dtype == np.int32 and array.shape == (len(rows), LENGTH) for array in arrays)
    real = rows.document_ids >= 0
    assert np.all(real == (np.cumsum(~real, axis=1) == 0)), "padding comes last"
    assert np.all(real[:, 0])
    assert np.all(rows.tokens[~real] == PAD) and np.all(rows.labels[~real] == IGNORED)
    assert np.all(rows.position_ids[~real] == 0)


@settings(max_examples=60)
@given(DOCUMENTS, st.sampled_from(["line", "document"]), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_packed(documents: list[list[int]], unit: str, stored: bool, bos: bool, end: bool, shuffle: bool) -> None:
    end = end or stored
    wanted = texts(documents, bos=bos, end=end)
    if not any(len(ids) > 1 for ids in wanted):
        return
    with TemporaryDirectory() as folder:
        store = store_of(Path(folder), documents, unit=unit, eos=EOS if stored else None)
        rows = rows_of(store, "packed", 1, shuffle=shuffle, bos=bos, append_eos=end)
    check_arrays(rows)
    assert rows.labels is not None
    pieces: dict[tuple[int, ...], int] = {}
    for row in range(len(rows)):
        for number in range(rows.document_ids[row].max() + 1):
            columns = np.flatnonzero(rows.document_ids[row] == number)
            assert np.array_equal(columns, np.arange(columns[0], columns[-1] + 1))
            assert rows.position_ids[row][columns].tolist() == list(range(len(columns)))
            inputs, labels = rows.tokens[row][columns], rows.labels[row][columns]
            assert np.array_equal(inputs[1:], labels[:-1])
            piece = (*inputs.tolist(), int(labels[-1]))
            pieces[piece] = pieces.get(piece, 0) + 1
    expected = [tuple(ids[at : at + LENGTH + 1]) for ids in wanted for at in range(0, len(ids) - 1, LENGTH)]
    assert sorted(pieces) == sorted(expected), "documents, or pieces of one that overlap by one token"
    assert set(pieces.values()) == {1}
    assert np.count_nonzero(rows.labels >= 0) == sum(len(ids) - 1 for ids in wanted)


@settings(max_examples=60)
@given(DOCUMENTS, st.sampled_from(["line", "document"]), st.booleans(), st.booleans(), st.booleans())
def test_stream(documents: list[list[int]], unit: str, stored: bool, bos: bool, end: bool) -> None:
    end = end or stored
    stream = [each for ids in texts(documents, bos=bos, end=end) for each in ids]
    if len(stream) < 2:
        return
    with TemporaryDirectory() as folder:
        store = store_of(Path(folder), documents, unit=unit, eos=EOS if stored else None)
        rows = rows_of(store, "stream", bos=bos, append_eos=end)
    check_arrays(rows)
    assert rows.labels is not None
    assert set(rows.document_ids.ravel().tolist()) <= {0, -1}
    for row, at in enumerate(range(0, len(stream) - 1, LENGTH)):
        real = rows.document_ids[row] >= 0
        piece = stream[at : at + LENGTH + 1]
        assert rows.tokens[row][real].tolist() == piece[:-1]
        assert rows.labels[row][real].tolist() == piece[1:]
        assert rows.position_ids[row][real].tolist() == list(range(len(piece) - 1))
    assert np.count_nonzero(rows.labels >= 0) == len(stream) - 1, "the last row is padded, not dropped"


def test_documents_of_seven_five_and_four_tokens_fill_a_row_of_sixteen(tmp_path: Path) -> None:
    rows = rows_of(store_of(tmp_path, [[7], [5], [4]]), "packed")
    assert rows.tokens.tolist() == [list(range(10, 26))]
    assert rows.labels is not None
    assert rows.labels.tolist() == [[*range(11, 17), EOS, *range(18, 22), EOS, *range(23, 26), EOS]]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", ["packed", "stream", "megatron"])
def test_document_starts_are_known_in_every_layout(tmp_path: Path, kind: str, bos: bool) -> None:
    if bos and kind == "megatron":
        return
    documents = [[4], [1], [40], [2], [21]]
    firsts = {BOS} if bos else {ids[0] for ids in texts(documents)}
    layout = Layout(kind, framing="causal", bos=bos)  # type: ignore[arg-type]
    source = RowSource(store_of(tmp_path, documents), layout, sequence_length=LENGTH, seed=3)  # type: ignore[arg-type]
    positions = np.arange(len(source))
    for epoch in (0, 1):
        starts = source.document_starts(epoch, positions)
        assert np.array_equal(starts, np.isin(source.load(epoch, positions).tokens, list(firsts)))
        assert starts.sum() == len(documents)


def test_eod_mask_loss_removes_the_labels_after_document_ends(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[4], [6], [30]], eos=EOS)
    for kind in ("stream", "megatron"):
        plain, masked = (rows_of(store, kind, eod_mask_loss=mask) for mask in (False, True))
        assert plain.labels is not None and masked.labels is not None
        assert np.array_equal(masked.labels, np.where(plain.tokens == EOS, IGNORED, plain.labels))
        assert np.count_nonzero(plain.labels != masked.labels) == 2


@pytest.mark.parametrize("kind", ["packed", "stream", "megatron"])
def test_any_part_of_an_epoch_is_the_same_rows(tmp_path: Path, kind: str) -> None:
    documents = [[(7 * d + 3 * n) % 25 + 1 for n in range(d % 5 + 1)] for d in range(40)]
    store, layout = store_of(tmp_path, documents, unit="document"), Layout(kind, framing="causal")  # type: ignore[arg-type]
    whole, again = (RowSource(store, layout, sequence_length=LENGTH, seed=42) for _ in range(2))  # type: ignore[arg-type]
    for epoch in (0, 2):
        expected = whole.load(epoch, np.arange(len(whole)))
        for start in range(0, len(whole), 5):
            part = again.load(epoch, np.arange(start, min(start + 5, len(whole))))
            for name in ("tokens", "labels", "document_ids", "position_ids", "keys"):
                assert np.array_equal(getattr(part, name), getattr(expected, name)[start : start + 5]), name
    first, second = (whole.load(epoch, np.arange(len(whole))).tokens for epoch in (0, 1))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("kind", ["packed", "stream", "megatron"])
def test_a_blend_of_stores_keeps_labels_and_a_blank_row_has_none(tmp_path: Path, kind: str) -> None:
    stores = [store_of(tmp_path / name, [[9, 20], [12]] * 4, unit="document") for name in "ab"]
    stores[1].facts.word_starts = True  # causal rows do not use word starts
    layout = Layout(kind, framing="causal")  # type: ignore[arg-type]
    sources = [
        RowSource(store, layout, sequence_length=LENGTH, seed=1, store_id=index)  # type: ignore[arg-type]
        for index, store in enumerate(stores)
    ]
    rows = Loader(sources, [1.0, 1.0]).load(0, 8)
    check_arrays(rows)
    assert rows.labels is not None
    same = rows.document_ids[:, 1:] == rows.document_ids[:, :-1]
    real = same & (rows.document_ids[:, 1:] >= 0)
    assert np.array_equal(rows.labels[:, :-1][real], rows.tokens[:, 1:][real])
    blank = sources[0].blank_row()
    check_arrays(blank)
    assert blank.labels is not None and np.all(blank.labels == IGNORED)


def test_a_vocabulary_with_few_special_tokens_works_where_possible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(tmp_path, [[7], [5]])
    full = store.facts.vocabulary
    bare = full.model_copy(update=dict.fromkeys(("pad", "cls", "sep", "mask", "bos", "eos")))
    store.facts.vocabulary = bare.model_copy(update={"sep": SEP})
    assert np.count_nonzero(rows_of(store, "packed").labels == SEP) == 2  # type: ignore[operator]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    store.facts.vocabulary, store.fingerprint = bare, "bare"
    with caplog.at_level(logging.WARNING, "terakoya"):
        for kind in ("packed", "stream"):
            rows = rows_of(store, kind)
            assert rows.labels is not None and not np.isin([EOS, BOS, SEP], [*rows.tokens, *rows.labels]).any()
            assert np.count_nonzero(rows.labels >= 0) == (10 if kind == "packed" else 11)
    assert "no end-of-sequence token" in caplog.text
    with pytest.raises(UserError, match="beginning-of-sequence"):
        rows_of(store, "packed", bos=True)
    with pytest.raises(UserError, match="eod_mask_loss"):
        rows_of(store, "stream", eod_mask_loss=True)


def test_an_unknown_end_of_document_token_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "terakoya"):
        rows = rows_of(store_of(tmp_path, [[7], [5]], eos=8), "packed")
    assert np.count_nonzero(rows.labels == 8) == 2  # type: ignore[operator]
    assert "stop at 8" in caplog.text


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[5], [6]])
    for kind in ("lines", "pairs"):
        with pytest.raises(UserError, match="packed, stream and megatron"):
            rows_of(store, kind)
    with pytest.raises(UserError, match=r"objective\.bos"):
        rows_of(store, "megatron", bos=True)
    with pytest.raises(UserError, match="layout is for causal models"):
        RowSource(store, Layout("megatron"), sequence_length=LENGTH, seed=1)  # type: ignore[arg-type]
    one = store_of(tmp_path / "one", [[1]])
    with pytest.raises(UserError, match="at least one row"):
        rows_of(one, "packed", append_eos=False)


def test_without_a_padding_token_rows_are_padded_with_the_end_token(tmp_path: Path) -> None:
    """Only `document_ids` and labels distinguish that padding from a real end token."""
    store = store_of(tmp_path, [[7]])
    store.facts.vocabulary = store.facts.vocabulary.model_copy(update={"pad": None})
    rows = rows_of(store, "packed")
    assert rows.tokens[0, 7:].tolist() == [EOS] * 9 and np.all(rows.document_ids[0, 7:] == -1)
