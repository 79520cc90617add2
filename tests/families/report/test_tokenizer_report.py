"""Tokenizer reports: every figure equals a count made only with Transformers' tokenizer."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.tokenization.train import train_tokenizer
from terakoya_report.tokenizer_page import COLOURS, render_page, summary_figures
from terakoya_report.tokenizer_pieces import read_pieces
from terakoya_report.tokenizer_report import TokenizerReport, character_class, report_tokenizers

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
    return report_tokenizers([folder / "tok"], [folder / "other.jsonl"])[0]


def test_figures_equal_those_from_transformers(folder: Path, measured: TokenizerReport) -> None:
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


def test_folders_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tok", tmp_path / "b" / "tok")
    reports = report_tokenizers([folder / "tok", tmp_path / "b" / "tok"], [folder / "other.jsonl"])
    assert [report.name for report in reports] == [f"{folder.name}/tok", "b/tok"]


def test_coverage_by_class(folder: Path, measured: TokenizerReport) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
    kanji = Counter(c for c in OTHER + TEXTS[0] if character_class(c) == "kanji")
    known = {c for c in kanji if tokenizer.unk_token_id not in tokenizer(c, add_special_tokens=False)["input_ids"]}
    coverage = measured.coverage["kanji"]
    assert (coverage.characters, coverage.distinct) == (kanji.total(), len(kanji))
    assert (coverage.known, coverage.distinct_known) == (sum(kanji[c] for c in known), len(known))
    assert 0 < coverage.known < coverage.characters
    assert "digits" not in measured.coverage, "the text has no digits"


def test_pieces(measured: TokenizerReport) -> None:
    unused = measured.unused_pieces()
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


def test_page_is_valid_and_escapes_text(measured: TokenizerReport) -> None:
    text = render_page([measured, measured], corpus="<a & b>.txt")
    root = ElementTree.fromstring(text.split("\n", 1)[1].replace('<meta charset="utf-8">', ""))
    assert len(root.findall(".//svg")) == 4 and len(root.findall(".//rect")) > 40
    assert "&lt;a &amp; b&gt;.txt" in text and "<b>" not in text
    for figure in summary_figures(measured).values():
        assert figure in text


def test_an_empty_corpus_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="at least one document"):
        report_tokenizers([folder / "tok"], [tmp_path / "empty.txt"])


def test_byte_level_pieces_are_shown_as_text(folder: Path) -> None:
    source = folder / "text.txt"
    settings = {"type": "byte_bpe", "vocab_size": 1000}
    train_tokenizer(Corpus([source]), folder / "bytes", settings=settings)
    pieces = report_tokenizers([folder / "bytes"], [source])[0].pieces
    assert {"の", "\u2581", "いる"} <= set(pieces), [piece for piece in pieces if not piece.isascii()][-40:]
    assert len(set(pieces)) == len(pieces), "partial characters are distinguished"
    assert {"\\xe3", "\\x81", "\\x00", "\\n"} <= set(pieces)


def byte_level(pieces: list[bytes]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these pieces and two tokens that are not byte-level."""
    library = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written: dict[int, str] = {}
    for character in map(chr, [*range(0x800), *range(0x800, 0xD800, 64), *range(0x10000, 0x110000, 4096)]):
        written.update(zip(character.encode(), library.pre_tokenize_str(character)[0][0], strict=True))
    vocabulary = ["<s>", *("".join(written[byte] for byte in piece) for piece in pieces)]
    backend = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(vocabulary)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.add_tokens(["é終"])
    return tokenizer


def test_parts_of_characters_are_shown_as_bytes() -> None:
    whole = [text.encode() for text in ("の", " 朝の\n", "é", "𠮷", "##")]
    parts = [b"\xe3\x81", b"\xae\xe3\x81", "雨".encode() + b"\xe3", b"\xb8\x82a", b"\xf0\xa0\xae"]
    tokenizer = byte_level([*whole, *parts])
    pieces, lengths = read_pieces(tokenizer, len(tokenizer))
    assert dict(zip(pieces, lengths.tolist(), strict=True)) == {
        "<s>": 3, "の": 1, "\u2581朝の\\n": 3, "é": 1, "𠮷": 1, "##": 2,
        "\\xe3\\x81": 1, "\\xae\\xe3\\x81": 2, "雨\\xe3": 2, "\\xb8\\x82a": 2, "\\xf0\\xa0\\xae": 1, "é終": 2,
    }  # fmt: skip


def test_bytes_of_sentencepiece_are_one_character(folder: Path) -> None:
    settings = {"type": "sentencepiece", "vocab_size": 400, "byte_fallback": True, "hard_vocab_limit": False}
    train_tokenizer(Corpus([folder / "text.txt"]), folder / "pieces", settings=settings)
    (folder / "rare.txt").write_text("鱧の鱧", encoding="utf-8")
    measured = report_tokenizers([folder / "pieces"], [folder / "rare.txt"])[0]
    byte = measured.pieces.index("<0xE9>")
    assert (measured.counts[byte], measured.lengths[byte]) == (2, 1)
    assert measured.longest(1)[0][1] == 2, "the most frequent piece of one character, which is a byte"
    assert measured.piece_lengths()[0] >= 256 > measured.piece_lengths()[5]


def test_tokenizers_without_words_have_no_bars(measured: TokenizerReport) -> None:
    wordless = replace(measured, name="a<b", words=None)
    section = render_page([wordless, measured], corpus="").partition("<h2>Tokens per word</h2>")[2].partition("<h2>")[0]
    assert section.count("<rect") == 5 and "left out: a&lt;b." in section
    assert COLOURS[1] in section and COLOURS[0] not in section, "colours equal those of the legend"
    section = render_page([measured], corpus="").partition("<h2>Tokens per word</h2>")[2].partition("<h2>")[0]
    assert "left out" not in section


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 14])
def test_figures_in_charts_do_not_overlap(measured: TokenizerReport, number: int) -> None:
    text = render_page([measured] * number, corpus="")
    pictures = ElementTree.fromstring(text.split("\n", 1)[1].replace('<meta charset="utf-8">', "")).findall(".//svg")
    assert len(pictures) == 4
    for picture in pictures:
        bars, texts = picture.findall("rect"), picture.findall("text")
        bar = float(bars[0].attrib["width"]) + 2
        below = texts[-1].attrib["y"]
        figures = [each for each in texts if each.get("y") != below]
        assert len(figures) == (len(bars) if bar >= 12 else 0)
        for figure in figures:
            assert "transform" in figure.attrib or 6.5 * len(figure.text or "") <= bar, (figure.text, bar)
