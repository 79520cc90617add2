"""The card's language where nobody names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import BertTokenizer, PreTrainedTokenizerFast

from terakoya.hub.card_languages import guess_languages

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
