"""What a model card and the README of an export say that a tokenizer needs."""

from __future__ import annotations

from typing import Any

import pytest

from terakoya.toolkit.formats.tokenizer_needs import describe_tokenizer


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"word_tokenizer_type": "mecab"}, "`pip install fugashi unidic-lite`."),
        ({"word_tokenizer_type": "mecab", "mecab_kwargs": None}, "`pip install fugashi unidic-lite`."),
        ({"word_tokenizer_type": "mecab", "mecab_kwargs": {"mecab_dic": "ipadic"}}, "`pip install fugashi ipadic`."),
        ({"mecab_kwargs": {"mecab_dic": "unidic"}}, "`pip install fugashi unidic` and `python -m unidic download`."),
        (
            {"mecab_kwargs": {"mecab_dic": None, "mecab_option": "-d /dic"}},
            "`pip install fugashi` and the dictionary of its MeCab options, `-d /dic`.",
        ),
        (
            {"mecab_kwargs": {"mecab_dic": "ipadic", "mecab_option": "-u user.dic"}},
            "`pip install fugashi ipadic`, and `user.dic` of this repository in the working directory",
        ),
        ({"word_tokenizer_type": "sudachi"}, "`pip install sudachipy sudachidict-core`."),
        (
            {"word_tokenizer_type": "sudachi", "sudachi_kwargs": {"sudachi_dict_type": "full"}},
            "`pip install sudachipy sudachidict-full`.",
        ),
        ({"word_tokenizer_type": "jumanpp"}, "`pip install rhoknp` and the program jumanpp"),
        ({"tokenizer_class": "BertGenerationTokenizer"}, "`pip install sentencepiece`."),
        ({"tokenizer_class": "SentencePieceBackend"}, "`pip install sentencepiece`."),
        (
            {"tokenizer_class": "SentencePieceBackend", "auto_map": {}},
            "`pip install sentencepiece`. Transformers 4 loads it with `trust_remote_code=True`, 5 without.",
        ),
        (
            {"word_tokenizer_type": "mecab"},
            "`pip install ./core/terakoya_tokenizer` in a copy of terakoya's repository",
        ),
    ],
)
def test_packages_of_each_kind_are_named(settings: dict[str, Any], words: str) -> None:
    assert words in describe_tokenizer({"tokenizer_class": "BertJapaneseTokenizer", **settings})


@pytest.mark.parametrize("settings", [{"tokenizer_class": "PreTrainedTokenizerFast"}, {"word_tokenizer_type": "basic"}])
def test_a_tokenizer_that_needs_nothing_more_says_so_by_saying_nothing(settings: dict[str, Any]) -> None:
    assert "install" not in describe_tokenizer({"tokenizer_class": "BertJapaneseTokenizer", **settings})
