"""A subset of a store equals a store of those documents alone, without a copy."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import toy
from small_preparation import prepare_corpus
from small_store import rewrite_store_json

from terakoya.components.rows import Layout
from terakoya.corpus.corpus import Corpus
from terakoya.rows.row_source import RowSource
from terakoya.store.subset import document_ranges, select_documents
from terakoya.store.token_store import TokenStore

LAYOUTS = [
    Layout("packed"),
    Layout("stream"),
    Layout("packed", framing="causal", append_eos=False),
    Layout("stream", framing="causal", append_eos=False),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """A store of 40 documents with word starts, next to its corpus."""
    store = TokenStore.open(toy.make_store(tmp_path_factory.mktemp("whole") / "toy", documents=40, seed=5))
    return give_words(store, np.random.default_rng(5).integers(0, 2, store.facts.tokens).astype(bool))


def give_words(store: TokenStore, starts: np.ndarray) -> TokenStore:
    """Sets the word starts of `store` to `starts` (T,) bool."""
    np.packbits(starts, bitorder="little").tofile(store.folder / "tokens.words")
    rewrite_store_json(store.folder)
    return TokenStore.open(store.folder)


@pytest.mark.parametrize(("first", "stop"), [(0, 13), (7, 8), (11, 40)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.framing}-{layout.kind}")
def test_a_subset_has_the_rows_of_a_store_of_its_documents(
    whole: TokenStore, layout: Layout, first: int, stop: int, tmp_path: Path
) -> None:
    lines = (whole.folder.parent / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "some.jsonl").write_text("\n".join(lines[first:stop]))
    tokenizer = whole.folder.parent / "tokenizer"
    prepare_corpus(Corpus([tmp_path / "some.jsonl"]), toy.WordTokenizer(has_eos=False), tokenizer, tmp_path / "store")
    alone = TokenStore.open(tmp_path / "store")
    some = select_documents(whole, first, stop)
    begin = int(whole.offsets[first])
    alone = give_words(alone, whole.word_starts(begin, begin + alone.facts.tokens))
    assert (some.facts.documents, some.facts.tokens) == (stop - first, alone.facts.tokens)
    sources = [RowSource(store, layout, sequence_length=16, seed=3) for store in (alone, some)]
    assert len(sources[0]) == len(sources[1])
    expected, got = (source.load(1, np.arange(len(source))) for source in sources)
    for name in ("tokens", "document_ids", "position_ids", "word_starts", "keys", "labels"):
        np.testing.assert_array_equal(getattr(expected, name), getattr(got, name), err_msg=name)
    if layout.framing == "encoder":
        assert got.word_starts is not None and got.word_starts.any()
    np.testing.assert_array_equal(some.word_starts(0, some.facts.tokens), alone.word_starts(0, alone.facts.tokens))


def test_subsets_have_their_own_fingerprints_and_are_picklable(whole: TokenStore) -> None:
    parts = [select_documents(whole, 0, 20), select_documents(whole, 20, 40), select_documents(whole, 0, 21)]
    assert len({store.fingerprint for store in [whole, *parts]}) == 4
    back = pickle.loads(pickle.dumps(parts[1]))
    assert back.fingerprint == parts[1].fingerprint
    np.testing.assert_array_equal(back.tokens, parts[1].tokens)


@pytest.mark.parametrize(
    ("documents", "shares", "expected"),
    [
        (1000, (949, 50, 1), [(0, 949), (949, 999), (999, 1000)]),
        (7, (998, 1, 1), [(0, 7), (7, 7), (7, 7)]),
        (10, (3, 1), [(0, 8), (8, 10)]),  # 7.5 is rounded to the even number, as in numpy and Megatron-Core
        (153, (0.9, 0.1), [(0, 138), (138, 153)]),
    ],
)
def test_document_ranges_follow_megatrons_rule(
    documents: int, shares: tuple[float, ...], expected: list[tuple[int, int]]
) -> None:
    assert document_ranges(documents, shares) == expected


def test_the_store_json_stays_as_it_is(whole: TokenStore) -> None:
    before = json.loads((whole.folder / "store.json").read_text())
    RowSource(select_documents(whole, 3, 9), Layout("packed"), sequence_length=16, seed=3)
    assert json.loads((whole.folder / "store.json").read_text()) == before
