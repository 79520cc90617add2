"""The language of a vocabulary, and the marks that its tokenizer keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from terakoya.tokenization.languages import guess_languages, warn_of_lost_dakuten
from terakoya.tokenization.recognise import recognise_tokenizer

LATIN = [f"w{number}" for number in range(90)]


@pytest.mark.parametrize(
    ("words", "expected"), [(["の", "は", "##ます", "カメラ"] * 3, ["ja"]), (["の"], []), (["東京", "北京"], [])]
)
def test_kana_make_a_vocabulary_japanese(words: list[str], expected: list[str], tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LATIN]
    pieces += [f"{word}{number or ''}" for number, word in enumerate(words)]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    assert guess_languages(BertTokenizer(str(tmp_path / "vocab.txt"))) == expected


def test_bytes_of_kana_count() -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["これはひらがなのぶんです。とてもながいです。" * 20], vocab_size=300)
    assert guess_languages(PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)) == ["ja"]


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "が", "か", "##ぎ", "##き", "パンダ", "ハンダ"]
BERT = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "tokenize_chinese_chars": False}
JAPANESE = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic", "do_lower_case": True}


@pytest.mark.parametrize(
    ("config", "pieces", "warned"),
    [
        (BERT, PIECES, True),
        ({**BERT, "do_lower_case": False}, PIECES, False),
        ({**BERT, "strip_accents": False}, PIECES, False),
        (BERT, [*PIECES, *(f"w{number}" for number in range(200))], False),
        (JAPANESE, PIECES, True),
        ({**JAPANESE, "do_lower_case": False}, PIECES, False),
        ({**JAPANESE, "word_tokenizer_type": "mecab", "mecab_kwargs": {"mecab_dic": "unidic_lite"}}, PIECES, False),
    ],
)
def test_a_japanese_tokenizer_that_removes_dakuten_is_told(
    config: dict[str, Any], pieces: list[str], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = recognise_tokenizer(tmp_path)
    warn_of_lost_dakuten(tokenizer.encoder(tmp_path), tokenizer, tmp_path)
    assert ("reads パンダ and ハンダ alike" in caplog.text) == warned
    plain = AutoTokenizer.from_pretrained(tmp_path)
    if len(pieces) == len(PIECES):
        assert (
            plain("が", add_special_tokens=False).input_ids == plain("か", add_special_tokens=False).input_ids
        ) == warned
