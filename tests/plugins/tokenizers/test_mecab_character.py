"""The tokenizer `mecab_character`: characters with word starts, folders that load with the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import ids_of_lines, write_texts
from transformers import AutoTokenizer

from terakoya.corpus.corpus import Corpus
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.tokenization.train import train_tokenizer
from terakoya_plugins.tokenizers.mecab_character import MecabCharacter

TEXTS = [
    "川の向こうの工場では、夜も機械の音がする。\n音は風にのって町まで届く。",
    "雪がつもった朝、だれかの足あとが門までつづいていた。",
    "Tokyoの地図を買って、駅から歩いた。",
]
HARD = [
    *TEXTS,
    "",
    "　 \t",
    "か\u3099ぎを𠮷田さんに。👨‍👩‍👧",
    "ＡＢＣ㌔①…ﾊﾟ",
    "町は[MASK]です。[CLS]音[SEP]",
    "## 音##風",
    "前\0後ろ",
    "a\u2028b\u0085c\u00a0d",
    "音" * 150,
    "İΣΣ",
    "\r",
    "音\r\x0b\n\u2028",
]


def train(folder: Path, **fields: Any) -> Path:
    MecabCharacter(**fields).train(write_texts(folder.with_suffix(".jsonl"), TEXTS), folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["marks", "plain"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("character") / "t", continuation_marks=request.param)


def test_ids_equal_those_of_the_loaded_folder(trained: Path) -> None:
    tokenizer = recognise_tokenizer(trained)
    assert isinstance(tokenizer, MecabCharacter)
    loaded = AutoTokenizer.from_pretrained(trained, local_files_only=True)
    assert type(loaded).__name__ == "BertJapaneseTokenizer"
    encoder = tokenizer.encoder(trained)
    for text in HARD:
        assert encoder.encode([text]).ids.tolist() == ids_of_lines(loaded, [text]), text
    assert encoder.encode(HARD).ids.tolist() == ids_of_lines(loaded, HARD)


ANY_TEXT = st.text(st.one_of(st.sampled_from("音風町 　#[MASK]\u3099が…Σİ"), st.characters(exclude_categories=["Cs"])))


@settings(max_examples=40)
@given(text=ANY_TEXT)
def test_ids_of_any_text(trained: Path, text: str) -> None:
    encoder, loaded = MecabCharacter().encoder(trained), MecabCharacter().load(trained)
    assert encoder.encode([text]).ids.tolist() == ids_of_lines(loaded, [text])


def test_lower_case(tmp_path: Path) -> None:
    for marks in (True, False):
        folder = train(tmp_path / str(marks), continuation_marks=marks, do_lower_case=True, dictionary="ipadic")
        tokenizer = MecabCharacter.from_folder(folder)
        assert tokenizer is not None and tokenizer.do_lower_case and tokenizer.dictionary == "ipadic"
        assert tokenizer.encoder(folder).encode(HARD).ids.tolist() == ids_of_lines(tokenizer.load(folder), HARD)


def test_pieces_are_characters_and_words_are_from_mecab(trained: Path) -> None:
    loaded = MecabCharacter().load(trained)
    marks = loaded.subword_tokenizer_type == "wordpiece"
    pieces = (trained / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert {len(piece.removeprefix("##")) for piece in pieces[15:]} == {1}
    plain = {piece for piece in pieces[15:] if len(piece) == 1}
    assert {piece[2:] for piece in pieces[15:] if len(piece) == 3} == (plain if marks else set())
    encoded = MecabCharacter().encoder(trained).encode(TEXTS[:2])
    words = [word for text in TEXTS[:2] for line in text.split("\n") for word in loaded.word_tokenizer.tokenize(line)]
    assert encoded.word_starts is not None
    assert encoded.word_starts.tolist() == [at == 0 for word in words for at in range(len(word))]
    assert max(map(len, words)) > 1
    if marks:
        shown = loaded.convert_ids_to_tokens(encoded.ids.tolist())
        assert [not piece.startswith("##") for piece in shown] == encoded.word_starts.tolist()


def test_unknown_characters(trained: Path) -> None:
    encoded = MecabCharacter().encoder(trained).encode(["地獄の町"])
    pieces = MecabCharacter().load(trained).convert_ids_to_tokens(encoded.ids.tolist())
    marks = MecabCharacter.from_folder(trained) == MecabCharacter(continuation_marks=True)
    assert pieces == (["[UNK]", "の", "町"] if marks else ["地", "[UNK]", "の", "町"])


def test_alphabet_is_limited(tmp_path: Path) -> None:
    encoder = MecabCharacter().encoder(train(tmp_path / "t", limit_alphabet=5, num_unused_tokens=2))
    assert encoder.vocabulary.size == 5 + 2 + 2 * 5
    assert encoder.vocabulary.special == tuple(range(7))


@pytest.mark.parametrize("mode", ["parse", "split", "reject"])
def test_literal_special_tokens(mode: Any, trained: Path) -> None:
    encoded = MecabCharacter(special_tokens_in_text=mode).encoder(trained).encode(["町は[MASK]です"])
    split = {"split_special_tokens": mode == "split"}
    assert encoded.ids.tolist() == ids_of_lines(MecabCharacter().load(trained), ["町は[MASK]です"], **split)
    assert (4 in encoded.ids) == (mode != "split") and dict(encoded.literals) == {"[MASK]": 1}


def test_trains_from_the_table_counted_for_wordpiece(tmp_path: Path) -> None:
    from terakoya_corpus.count_words import save_word_counts

    straight = train(tmp_path / "straight")
    corpus = tmp_path / "straight.jsonl"
    save_word_counts([corpus], tmp_path / "table", settings={"type": "mecab_wordpiece"}, processes=1)
    train_tokenizer(
        Corpus([corpus]), tmp_path / "kept", settings={"type": "mecab_character", "counts": str(tmp_path / "table")}
    )
    for file in straight.iterdir():
        assert file.read_bytes() == (tmp_path / "kept" / file.name).read_bytes()


def test_fingerprint_depends_on_vocabulary_and_dictionary(tmp_path: Path) -> None:
    one, two = train(tmp_path / "one"), train(tmp_path / "two", dictionary="ipadic", limit_alphabet=9)
    first, second = MecabCharacter().fingerprint(one), MecabCharacter().fingerprint(two)
    different = {name for name in first if first[name] != second[name]}
    assert different == {"vocabulary", "tokenizer_config", "dictionary"}
