"""For tokenizers whose tokens may hold line ends, a store of documents has them and a store of lines does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from texts import write_texts

from terakoya.preparation.prepare import prepare
from terakoya.store.token_store import TokenStore
from terakoya.tokenization.train import train_tokenizer

TEXTS = [
    "一行目は短い。\n二行目も短い。\n\n段落が変わると、空の行がある。",
    "def add(a, b):\n    return a + b\n",
    "一つの行だけの文書。",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("whole")
    corpus = write_texts(base / "corpus.jsonl", TEXTS * 30)
    train_tokenizer(corpus, base / "bpe", settings={"type": "byte_bpe", "vocab_size": 300})
    train_tokenizer(corpus, base / "spm", settings={"type": "sentencepiece", "vocab_size": 45})
    return base


def test_a_store_of_documents_decodes_to_the_text_itself(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    prepare([folder / "corpus.jsonl"], tokenizer=folder / "bpe", out=tmp_path / "store", processes=1)
    store = TokenStore.open(tmp_path / "store")
    tokenizer = AutoTokenizer.from_pretrained(folder / "bpe")
    for number, text in enumerate(TEXTS):
        ids = store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer(text)["input_ids"]


def test_a_store_of_lines_has_the_lines(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    prepare([folder / "corpus.jsonl"], tokenizer=folder / "bpe", out=tmp_path / "store", processes=1, unit="line")
    store = TokenStore.open(tmp_path / "store")
    tokenizer = AutoTokenizer.from_pretrained(folder / "bpe")
    lines = [line for text in TEXTS for line in text.split("\n") if line]
    for number, line in enumerate(lines):
        ids = store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()
        assert tokenizer.decode(ids) == line


def test_sentencepiece_reads_whole_documents(folder: Path, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    prepare([folder / "corpus.jsonl"], tokenizer=folder / "spm", out=tmp_path / "store", processes=1, append_eos=True)
    store = TokenStore.open(tmp_path / "store")
    (model,) = (folder / "spm").glob("*.model")
    processor = SentencePieceProcessor(model_file=str(model))
    for number, text in enumerate(TEXTS):
        ids = store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()
        assert ids == [*processor.encode(text), processor.eos_id()]
