"""Tokenizer reports: every figure against a count made with Transformers' tokenizer alone."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from terakoya.commands.tokenizer_report import report
from terakoya.data.corpus import Corpus
from terakoya.errors import UserError
from terakoya.tokenizer import train_tokenizer
from terakoya.tokenizer_report import TokenizerReport, character_class
from terakoya.tokenizer_report_page import figures, page

TEXTS = [
    "朝の市場では、魚屋が大きな声で今日の鯵をすすめていた。\n値段は百円から。",
    "図書館の二階には、古い地図と航海日誌が並んでいる。",
    "Pythonで書いた小さなプログラムが、3分で終わるはずの計算に一晩かかった。",
    "雨が上がると、子どもたちは長靴のまま川へ走っていく。",
]
OTHER = "鰯雲と☂と<b>のにおい。鱧も。\n朝の川で魚を見た。"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("report")
    source = base / "text.txt"
    source.write_text("\n\n".join(TEXTS * 5), encoding="utf-8")
    train_tokenizer(Corpus([source]), base / "tok", settings={"type": "mecab_wordpiece", "vocab_size": 260})
    (base / "other.jsonl").write_text(json.dumps({"text": OTHER}) + "\n" + json.dumps({"text": TEXTS[0]}) + "\n")
    return base


@pytest.fixture(scope="module")
def measured(folder: Path) -> TokenizerReport:
    return report([folder / "tok"], [folder / "other.jsonl"])[0]


def test_figures_are_those_of_transformers(folder: Path, measured: TokenizerReport) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
    lines = [*OTHER.split("\n"), *TEXTS[0].split("\n")]
    ids = [id for line in lines for id in tokenizer(line, add_special_tokens=False)["input_ids"]]
    words = [word for line in lines for word in tokenizer.word_tokenizer.tokenize(line)]
    of_word = Counter(min(5, len(tokenizer.subword_tokenizer.tokenize(word))) for word in words)
    assert (measured.documents, measured.kind) == (2, "mecab_wordpiece")
    assert measured.characters == sum(map(len, lines))
    assert (measured.tokens, measured.unknown) == (len(ids), ids.count(tokenizer.unk_token_id))
    assert measured.unknown > 0
    assert measured.words == tuple(of_word[length] for length in range(1, 6))
    assert Counter({id: count for id, count in enumerate(measured.counts.tolist()) if count}) == Counter(ids)
    assert measured.tokens_per_word == len(ids) / len(words)
    assert measured.split_rate == 1 - of_word[1] / len(words)
    assert measured.characters_per_token == measured.characters / len(ids)


def test_coverage_by_class(folder: Path, measured: TokenizerReport) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
    kanji = Counter(c for c in OTHER + TEXTS[0] if character_class(c) == "kanji")
    known = {c for c in kanji if tokenizer.unk_token_id not in tokenizer(c, add_special_tokens=False)["input_ids"]}
    coverage = measured.coverage["kanji"]
    assert (coverage.characters, coverage.distinct) == (kanji.total(), len(kanji))
    assert (coverage.known, coverage.distinct_known) == (sum(kanji[c] for c in known), len(known))
    assert 0 < coverage.known < coverage.characters
    assert "digits" not in measured.coverage, "there are none in this text"


def test_pieces(measured: TokenizerReport) -> None:
    unused = measured.never_used()
    used = {measured.pieces[id] for id in measured.counts.nonzero()[0].tolist()}
    assert not used & set(unused)
    assert len(unused) + len(used - {"[UNK]"}) == measured.vocabulary - measured.special
    longest = measured.longest(3)
    sizes = [len(piece.removeprefix("##")) for piece, _ in longest]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(measured.piece_lengths()) == measured.vocabulary - measured.special
    shares = measured.share_of_most_frequent([1, 5, 10_000])
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert shares[0] == measured.counts.max() / measured.tokens


@pytest.mark.parametrize(
    ("character", "expected"),
    [("あ", "hiragana"), ("ー", "katakana"), ("ｱ", "katakana"), ("漢", "kanji"), ("々", "kanji"), ("Ａ", "latin"),
     ("é", "latin"), ("９", "digits"), ("、", "punctuation"), ("☂", "symbols"), ("я", "other"), ("𠮷", "kanji")],
)  # fmt: skip
def test_classes(character: str, expected: str) -> None:
    assert character_class(character) == expected


def test_page_is_sound_and_escapes(measured: TokenizerReport) -> None:
    text = page([measured, measured], corpus="<a & b>.txt")
    root = ElementTree.fromstring(text.split("\n", 1)[1].replace('<meta charset="utf-8">', ""))
    assert len(root.findall(".//svg")) == 4 and len(root.findall(".//rect")) > 40
    assert "&lt;a &amp; b&gt;.txt" in text and "<b>" not in text
    for figure in figures(measured).values():
        assert figure in text


def test_nothing_to_measure_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="at least one document"):
        report([folder / "tok"], [tmp_path / "empty.txt"])


def test_byte_level_pieces_are_shown_as_text(folder: Path) -> None:
    source = folder / "text.txt"
    settings = {"type": "byte_bpe", "vocab_size": 1000}
    train_tokenizer(Corpus([source]), folder / "bytes", settings=settings)
    pieces = report([folder / "bytes"], [source])[0].pieces
    assert {"の", "\u2581", "いる"} <= set(pieces), [piece for piece in pieces if not piece.isascii()][-40:]
    assert len(set(pieces)) == len(pieces), "parts of characters are told apart"
