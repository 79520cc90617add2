"""A store knows how much text its documents are, and losses are reported for each character and byte of it."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import toy
from small_preparation import prepare_corpus
from small_store import damage
from texts import write_texts
from word_tokenizer import WordTokenizer, make_folder

from terakoya.components import LossTerm
from terakoya.components.rows import Layout
from terakoya.errors import UserError
from terakoya.rows.loader import Loader, Stage
from terakoya.rows.row_source import RowSource
from terakoya.store.document_sizes import FILE, TextPerToken
from terakoya.store.subset import select_documents
from terakoya.store.token_store import TokenStore
from terakoya.training.loss import to_bits
from terakoya_checks.verify_store import verify
from terakoya_stores.merge import merge
from terakoya_stores.split import split

WORDS = ["東京", "寺子屋", "𠮷野家", "abc", "ｶﾞｯｺｳ", "🎌"]


def texts(seed: int, count: int) -> list[str]:
    """Documents of words, each with its number; every seventh has no token."""
    rng = np.random.default_rng(seed)
    return [
        "~ ~" if number % 7 == 3 else f"w{seed}x{number}\n" + "  ".join(rng.choice(WORDS, rng.integers(1, 30)))
        for number in range(count)
    ]


def prepare(folder: Path, documents: list[str], tokenizer: Path, **options: object) -> TokenStore:
    folder.mkdir()
    corpus = write_texts(folder / "text.jsonl", documents)
    prepare_corpus(corpus, WordTokenizer(), tokenizer, folder / "store", max_rejects=1.0, **options)
    return TokenStore.open(folder / "store")


def expected(documents: list[str]) -> list[list[int]]:
    return [[len(text), len(text.encode())] for text in documents if text != "~ ~"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("sizes") / "tokenizer", size=1000)


@pytest.mark.parametrize("unit", ["document", "line"])
def test_a_store_records_characters_and_bytes_of_each_document(tmp_path: Path, tokenizer: Path, unit: str) -> None:
    documents = texts(1, 40)
    store = prepare(tmp_path / "a", documents, tokenizer, unit=unit)
    assert store.sizes.tolist() == expected(documents)
    characters, size = map(sum, zip(*expected(documents), strict=True))
    assert store.text_per_token == TextPerToken(characters / store.facts.tokens, size / store.facts.tokens)
    assert verify(store.folder) == []


def test_split_and_merged_stores_and_subsets_keep_them(tmp_path: Path, tokenizer: Path) -> None:
    first, second = texts(1, 60), texts(2, 30)
    a, b = prepare(tmp_path / "a", first, tokenizer), prepare(tmp_path / "b", second, tokenizer)
    merge([a.folder, b.folder], tmp_path / "both")
    both = TokenStore.open(tmp_path / "both")
    assert both.sizes.tolist() == expected(first + second)
    by_ids = {tuple(a.ids(*a.document_starts(np.array([n, n + 1])).tolist())): size for n, size in enumerate(a.sizes)}
    assert len(by_ids) == a.facts.documents
    outs = [tmp_path / "c", tmp_path / "d"]
    split(a.folder, outs, weights=[2, 1])
    for part in map(TokenStore.open, outs):
        bounds = part.document_starts(np.arange(part.facts.documents + 1)).tolist()
        pairs = zip(bounds, bounds[1:], part.sizes, strict=False)
        assert all(by_ids[tuple(part.ids(start, stop))].tolist() == size.tolist() for start, stop, size in pairs)
    subset = select_documents(a, 5, 9)
    assert subset.sizes.tolist() == expected(first)[5:9]
    assert subset.text_per_token is not None and a.text_per_token is not None
    assert subset.text_per_token.bytes * subset.facts.tokens == pytest.approx(sum(s for _, s in expected(first)[5:9]))


def test_damage_is_found(tmp_path: Path, tokenizer: Path) -> None:
    store = prepare(tmp_path / "a", texts(1, 10), tokenizer)
    damage(store.folder / FILE)
    with pytest.raises(UserError, match=f"{FILE}: content changed"):
        _ = TokenStore.open(store.folder).text_per_token
    assert any(FILE in fault for fault in verify(store.folder))
    (store.folder / FILE).write_bytes(b"")
    with pytest.raises(UserError, match=f"{FILE}: expected 72 bytes, got 0"):
        TokenStore.open(store.folder)


def test_the_text_of_mixed_rows_is_weighted_by_the_rows_of_each_store(tmp_path: Path, tokenizer: Path) -> None:
    layout = Layout(kind="stream", framing="causal")
    stores = [prepare(tmp_path / str(seed), texts(seed, 60), tokenizer) for seed in (1, 2)]
    sources = [
        RowSource(store, layout, sequence_length=8, seed=0, store_id=number) for number, store in enumerate(stores)
    ]
    loader = Loader(sources, [3.0, 1.0], stages=[Stage(8, {1: 1.0})])
    first, second = (store.text_per_token for store in stores)
    assert first is not None and second is not None
    assert loader.text_per_token(8, 12) == second
    mixed = loader.text_per_token(0, 8)
    assert mixed is not None and mixed.characters == pytest.approx(0.75 * first.characters + 0.25 * second.characters)
    (stores[0].folder / "store.json").unlink()  # nothing is read again
    assert loader.text_per_token(0, 8) == mixed


def test_bits_follow_from_the_mean_loss_and_the_text_of_a_token() -> None:
    terms = {"lm_loss": LossTerm("targets", 1.0, bits="bits"), "z_loss": LossTerm("targets", 0.1)}
    bits = to_bits({"lm_loss": math.log(8), "z_loss": 2.0}, terms, TextPerToken(2.0, 6.0))
    assert bits == {"bits_per_character": pytest.approx(1.5), "bits_per_byte": pytest.approx(0.5)}
    assert to_bits({"lm_loss": 1.0}, terms, None) == to_bits({}, terms, TextPerToken(2.0, 6.0)) == {}


def test_a_run_and_its_validation_report_bits(tmp_path: Path, tokenizer: Path) -> None:
    stores = [prepare(tmp_path / str(seed), texts(seed, 60), tokenizer) for seed in (1, 2)]
    settings = toy.parameters(stores[0].folder, stores[1].folder, max_steps=2)
    output = toy.train(settings, tmp_path / "run")
    validation = toy.records(tmp_path / "run", "validation")[2]
    assert f"  {toy.records(tmp_path / 'run')[2]['masked_bits_per_character']:.4f} bits/character  " in output
    for record, store in chain(
        ((each, stores[0]) for each in toy.records(tmp_path / "run").values()),
        [(validation, stores[1])],
    ):
        characters, size = store.sizes.sum(axis=0).tolist()
        bits = record["mlm_loss"] / math.log(2) * store.facts.tokens
        assert record["masked_bits_per_character"] == pytest.approx(bits / characters)
        assert record["masked_bits_per_byte"] == pytest.approx(bits / size)
