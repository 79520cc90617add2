"""The bundled word finders: which words they find, and where these are in the text as it is."""

from __future__ import annotations

import logging

import pytest

from terakoya.components import WordFinder
from terakoya_plugins.word_finders.mecab import Mecab
from terakoya_plugins.word_finders.spaces import Spaces


def words(finder: WordFinder, text: str) -> list[str]:
    return [text[start:stop] for start, stop in finder.build()([text])[0].tolist()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("吾輩は猫である。", ["吾輩", "は", "猫", "で", "ある", "。"]),
        ("  猫　と\n\n犬 \n", ["猫", "と", "犬"]),
        ("ｶﾞｽとＡＢＣ", ["ｶﾞｽ", "と", "ＡＢＣ"]),
        ("猫。\n５㌔と犬\n鳥", ["猫", "。", "５", "㌔", "と", "犬", "鳥"]),
        ("名㍿㍿Ａ", ["名", "㍿", "㍿", "Ａ"]),  # of 株式 and 会社 each
        ("猫\0犬", ["猫", "犬"]),
        (" \n　", []),
        ("", []),
    ],
)
def test_mecab_finds_words_of_the_text_as_it_is(text: str, expected: list[str]) -> None:
    assert words(Mecab(), text) == expected


def test_mecab_reads_nfkc_unless_told_otherwise() -> None:
    text = "５㌔メートル"
    assert words(Mecab(), text) != words(Mecab(normalize_text=False), text)
    assert (
        Mecab().fingerprint() == Mecab(normalize_text=False).fingerprint() != Mecab(dictionary="ipadic").fingerprint()
    )


def test_a_line_that_is_too_long_for_mecab_has_words_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "吾輩は猫である。" * 6
    expected = words(Mecab(), text)
    monkeypatch.setattr("terakoya_tokenizer.mecab.SAFE_CHARACTERS", 8)
    with caplog.at_level(logging.WARNING):
        assert words(Mecab(), text) == expected


@pytest.mark.parametrize(
    ("punctuation", "expected"),
    [
        (True, ["It", "'", "s", "naïve", ",", "हिन्दी", "+", "e\u0301"]),
        (False, ["It's", "naïve,", "हिन्दी", "+", "e\u0301"]),
    ],
)
def test_spaces_and_marks_end_a_word(punctuation: bool, expected: list[str]) -> None:
    assert words(Spaces(punctuation=punctuation), " It's naïve, \n\n हिन्दी + e\u0301\t") == expected
