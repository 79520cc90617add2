"""Rows of conversations: each conversation is whole or truncated at the row's end, and only answers are labels."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.rows.causal_rows import IGNORED
from terakoya.rows.row_source import RowSource
from terakoya.store.subset import select_documents
from terakoya.store.token_store import TokenStore
from terakoya.store.writer import write_store
from terakoya_conversations.rows import Conversations

LENGTH, PAD, FIRST = 16, 0, 5
VOCABULARY = Vocabulary(size=5000, pad=PAD, bos=1, eos=2, special=(0, 1, 2))
TURNS = st.lists(st.integers(1, 12), min_size=2, max_size=5)
"""Tokens of each turn; every second one is an answer."""


def store_of(folder: Path, conversations: list[list[int]], *, answers: bool = True) -> TokenStore:
    """A store of conversations given as the lengths of their turns; its tokens are FIRST, FIRST + 1, ... in order."""
    following, documents, marks = FIRST, [], []
    for turns in conversations:
        documents.append([list(range(following, following + sum(turns)))])
        marks.append([list(chain.from_iterable([number % 2 == 1] * size for number, size in enumerate(turns)))])
        following += sum(turns)
    return write_store(folder, documents, vocabulary=VOCABULARY, answers=marks if answers else None)


def rows_of(store: TokenStore, kind: str = "packed", *, shuffle: bool = False, **settings: Any) -> Rows:
    layout = Layout(kind, framing="causal", append_eos=False, whole=Conversations(**settings))  # type: ignore[arg-type]
    source = RowSource(store, layout, sequence_length=LENGTH, seed=7, shuffle=shuffle)
    return source.load(0, np.arange(len(source)))


def expected(conversations: list[list[int]], loss_on: str, too_long: str) -> list[list[tuple[int, int]]]:
    """The tokens with their labels of each conversation that is kept, by plain loops."""
    result, following = [], FIRST
    for turns in conversations:
        tokens, marks = [], []
        for number, size in enumerate(turns):
            tokens += range(following, following + size)
            marks += [number if number % 2 else 0] * size
            following += size
        if len(tokens) > LENGTH + 1 and too_long == "drop":
            continue
        wanted = {mark for mark in marks[1:] if mark}
        if loss_on == "last_answer":
            wanted = {max(wanted, default=-1)}
        tokens, marks = tokens[: LENGTH + 1], marks[: LENGTH + 1]
        labels = [
            token if mark in wanted or loss_on == "all" else IGNORED
            for token, mark in zip(tokens[1:], marks[1:], strict=True)
        ]
        if set(labels) != {IGNORED}:
            result.append(list(zip(tokens[:-1], labels, strict=True)))
    return result


@settings(max_examples=30)
@given(
    st.lists(TURNS, min_size=1, max_size=9),
    st.sampled_from(["packed", "padded"]),
    st.sampled_from(["answers", "last_answer", "all"]),
    st.sampled_from(["truncate", "drop"]),
    st.booleans(),
)
def test_rows_equal_those_of_plain_loops(
    conversations: list[list[int]], kind: str, loss_on: str, too_long: str, shuffle: bool
) -> None:
    wanted = expected(conversations, loss_on, too_long)
    with TemporaryDirectory() as folder:
        store = store_of(Path(folder) / "s", conversations)
        if not wanted:
            with pytest.raises(UserError, match="at least one row"):
                rows_of(store, kind, loss_on=loss_on, too_long=too_long)
            return
        rows = rows_of(store, kind, shuffle=shuffle, loss_on=loss_on, too_long=too_long)
    assert rows.labels is not None
    found = []
    for row in range(len(rows)):
        real = rows.document_ids[row] >= 0
        assert np.all(rows.labels[row][~real] == IGNORED) and np.all(rows.tokens[row][~real] == PAD)
        numbers = range(rows.document_ids[row].max() + 1)
        assert kind == "packed" or len(numbers) == 1
        for number in numbers:
            columns = np.flatnonzero(rows.document_ids[row] == number)
            assert rows.position_ids[row][columns].tolist() == list(range(len(columns)))
            found.append(list(zip(rows.tokens[row][columns].tolist(), rows.labels[row][columns].tolist(), strict=True)))
    if kind == "padded" and not shuffle:
        assert found == wanted
    assert sorted(found) == sorted(wanted)


def test_conversations_longer_than_a_row_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(tmp_path / "s", [[3, 3], [5, 20], [20, 5], [6, 3, 30, 2]])
    with caplog.at_level(logging.WARNING, "terakoya"):
        rows_of(store)
        rows_of(store, too_long="drop")
        rows_of(store, loss_on="all")
        rows_of(store, loss_on="last_answer")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"3 of 4 conversations are longer than a row of 16 tokens: {consequence}"
        for consequence in (
            "2 are truncated, 1 are left out because no answer begins within the row",
            "they are left out",
            "3 are truncated",
            "1 are truncated, 2 are left out because their last answer does not begin within the row",
        )
    ]


def test_a_part_of_a_store_keeps_its_answers(tmp_path: Path) -> None:
    conversations = [[3, 4], [2, 5, 1, 3], [1, 1], [7, 2], [4, 4]]
    whole, alone = store_of(tmp_path / "whole", conversations), store_of(tmp_path / "alone", conversations[1:4])
    middle = select_documents(whole, 1, 4)
    assert middle.flag_bits("answers")[1] != 0, "the part begins inside a byte"
    np.testing.assert_array_equal(
        middle.read_learned(0, middle.facts.tokens), alone.read_learned(0, alone.facts.tokens)
    )
    one, other = rows_of(middle, "padded"), rows_of(alone, "padded")
    assert one.labels is not None and other.labels is not None
    np.testing.assert_array_equal(one.labels >= 0, other.labels >= 0)


def test_stores_and_layouts_that_do_not_match_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = store_of(tmp_path / "plain", [[3, 3]], answers=False)
    with pytest.raises(UserError, match=r"terakoya prepare FILES\.jsonl --conversations"):
        rows_of(plain)
    with pytest.raises(UserError, match="layouts packed and padded"):
        rows_of(plain, "stream")
    with pytest.raises(UserError, match="layouts packed, stream and megatron"):
        RowSource(plain, Layout("padded", framing="causal"), sequence_length=LENGTH, seed=1)
    with pytest.raises(UserError, match=r"expected a store of conversations"):
        plain.read_learned(0, 1)
    store = store_of(tmp_path / "conversations", [[3, 3]])
    with caplog.at_level(logging.WARNING, "terakoya"):
        RowSource(store, Layout("packed", framing="causal"), sequence_length=LENGTH, seed=1)
    assert "also of questions" in caplog.text
