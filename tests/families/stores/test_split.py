"""Splitting loses and repeats nothing, keeps order and words, and puts equal documents into one part."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from small_store import damage

from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore, Unit
from terakoya.store.writer import write_store
from terakoya_checks.verify_store import verify
from terakoya_stores.split import split

Document = tuple[tuple[int, ...], ...]


def random_documents(seed: int, count: int) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [
        tuple(tuple(rng.integers(0, 99, rng.integers(1, 9)).tolist()) for _ in range(rng.integers(1, 4)))
        for _ in range(count)
    ]


def make(folder: Path, documents: list[Document], unit: Unit = "line") -> TokenStore:
    words = [[[token % 2 == 0 for token in line] for line in document] for document in documents]
    return write_store(folder, documents, vocabulary=Vocabulary(size=100), unit=unit, word_starts=words)


def read(folder: Path) -> list[Document]:
    store = TokenStore.open(folder)
    assert store.word_starts(0, store.facts.tokens).tolist() == (store.tokens % 2 == 0).tolist()
    assert verify(folder) == []
    lines = [tuple(store.tokens[a:b].tolist()) for a, b in pairwise(store.offsets)]
    return [tuple(lines[a:b]) for a, b in pairwise(store.documents)]


@pytest.mark.parametrize("window", [7, 1 << 14])
def test_every_document_goes_to_one_part_in_order(tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya_stores.split._DOCUMENTS", window)
    monkeypatch.setattr("terakoya_stores.split._TOKENS", 5)
    documents = random_documents(1, 600)
    make(tmp_path / "store", documents)
    outs = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    facts = split(tmp_path / "store", outs, weights=[8, 1, 1])
    sides = [read(out) for out in outs]
    assert sorted(chain(*sides)) == sorted(documents)
    for side in sides:
        mine = set(side)
        assert side == [document for document in documents if document in mine]
    assert [one.documents for one in facts] == [len(side) for side in sides]
    assert 440 < len(sides[0]) < 520 and min(len(sides[1]), len(sides[2])) > 35
    assert facts[1].options["split"] == "part 2 of 8,1,1, seed 0"


def test_equal_documents_are_in_one_part_in_every_store(tmp_path: Path) -> None:
    documents = random_documents(2, 300)
    make(tmp_path / "twice", [*documents, *reversed(documents)])
    make(tmp_path / "some", documents[100:])
    for name in ("twice", "some"):
        split(tmp_path / name, [tmp_path / f"{name}.a", tmp_path / f"{name}.b"], weights=[1, 1])
    a, b = set(read(tmp_path / "twice.a")), set(read(tmp_path / "twice.b"))
    assert not a & b
    assert set(read(tmp_path / "some.a")) <= a and set(read(tmp_path / "some.b")) <= b


def test_the_seed_decides(tmp_path: Path) -> None:
    make(tmp_path / "store", random_documents(3, 100), "document")

    def tokens(name: str, seed: int) -> bytes:
        split(tmp_path / "store", [tmp_path / name, tmp_path / f"{name}.rest"], weights=[1, 1], seed=seed)
        return (tmp_path / name / "tokens.bin").read_bytes()

    assert tokens("a", 1) == tokens("b", 1) != tokens("c", 2)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens.words"])
def test_a_changed_file_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    store = make(tmp_path / "store", random_documents(5, 60))
    damage(store.folder / name)
    with pytest.raises(UserError, match=rf"store/{name}: content changed .*expected SHA-256 \w+, got \w+"):
        split(store.folder, [tmp_path / "a", tmp_path / "b"], weights=[1, 1])
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_impossible_splits_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path / "store", random_documents(4, 30))
    a, b = tmp_path / "a", tmp_path / "b"
    with pytest.raises(UserError, match="expected one weight for each --out, two or more, got 3 for 2"):
        split(store.folder, [a, b], weights=[1, 1, 1])
    with pytest.raises(UserError, match="weights of at least 1"):
        split(store.folder, [a, b], weights=[1, 0])
    with pytest.raises(UserError, match=r"weights with a sum below 2\^63, got 9223372036854775807, 1"):
        split(store.folder, [a, b], weights=[(1 << 63) - 1, 1])
    with pytest.raises(UserError, match=r"--seed: expected a number from .*, got 18446744073709551615"):
        split(store.folder, [a, b], weights=[1, 1], seed=(1 << 64) - 1)
    with pytest.raises(UserError, match="got one twice"):
        split(store.folder, [a, a], weights=[1, 1])
    with pytest.raises(UserError, match="part 2 of 1000000,1 gets none of 30"):
        split(store.folder, [a, b], weights=[1_000_000, 1])
    b.mkdir()
    (b / "mine").touch()
    with pytest.raises(UserError, match="expected a new or empty folder"):
        split(store.folder, [a, b], weights=[1, 1])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b", "store"]
