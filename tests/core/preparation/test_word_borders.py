"""`prepare --words`: the tokens at which words start, against an alignment character by character."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import fugashi
import numpy as np
import pytest
import sentencepiece
import tokenizers
import unidic_lite
from real_data import real_data
from small_vocabularies import train_sentencepiece, train_tokenizers

import terakoya
from terakoya.components.word_finder import FindWords
from terakoya.preparation.word_borders import FOUND, INSIDE, find_word_finder, mark_word_starts
from terakoya.tokenization.recognise import recognise_tokenizer

DEMO = (Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt").read_text(encoding="utf-8")[:12_000]
DOCUMENTS = [
    *DEMO.split("\n\n")[:12],
    "吾輩は猫である。\n名前は　まだ無い。\n\n  どこで生れたか、　 とんと見当が つかぬ。 ",
    "ＡＢＣ１２３！？（ｶﾞｷﾞｸﾞ）㌔メートルと㌘、㍻の株式会社。\n半角ｶﾅのﾃﾞｰﾀ",
    "名㍿㍿と㍿ｶﾞ。",  # a character of several words
    "ｶﾞｶﾞは㌔と㌔で、ｶﾞは㌔です。",  # as many bytes in NFKC, at other places
    "か\u3099んは\u309aる、ハ\u309aンと家族は👨‍👩‍👧‍👦です。❤️も",
    "𠮷野家で𩸽を食べる。龘鬱と魑魅魍魎が跋扈する",
    "The quick brown fox, it's here:  jumping\nover the lazy dogs 12 times.",
    "<s>始め</s>、<unk>と東京は<mask>です。<mask>",
    "",
    "　\n ",
    "あ",
]
"""Texts with white space of all kinds, NFKC in both directions, unknown characters and literal special tokens."""

Span = tuple[int, int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small tokenizers, trained here, in folders by their names."""
    home = tmp_path_factory.mktemp("tokenizers")
    result = {name: home / name for name in ("sentencepiece", "dummy-prefix", "bytes", "bytes-nfkc", "unigram")}
    for name, folder in result.items():
        folder.mkdir()
        if name in ("sentencepiece", "dummy-prefix"):
            train_sentencepiece(folder, DEMO, dummy_prefix=name == "dummy-prefix")
        else:
            train_tokenizers(folder, DEMO, name)
    return result


# ------------------------------------------------------------------------------- the alignment, slow and obvious


@cache
def _tagger() -> fugashi.GenericTagger:
    return fugashi.GenericTagger(f'-d "{unidic_lite.DICDIR}" -r "{unidic_lite.DICDIR}/mecabrc"')


def slow_words(text: str) -> list[Span]:
    """MeCab's words of each line in NFKC, and where they are in the text: where both sides of a position, normalised on
    their own, are what the whole line becomes."""
    spans = []
    at = 0
    for line in text.split("\n"):
        normal = unicodedata.normalize("NFKC", line)
        origin: dict[int, list[int]] = {}
        for cut in range(len(line) + 1):
            left, right = (unicodedata.normalize("NFKC", part) for part in (line[:cut], line[cut:]))
            if left + right == normal:
                origin.setdefault(len(left), []).append(at + cut)
        end = 0
        for node in _tagger()(normal):
            for part in node.surface.split():
                begin = normal.index(part, end)
                end = begin + len(part)
                first = max(place for place in origin if place <= begin)
                last = min(place for place in origin if place >= end)
                if spans and origin[first][-1] < spans[-1][1]:  # several words of one character, which they share
                    spans[-1] = (spans[-1][0], origin[last][0])
                else:
                    spans.append((origin[first][-1], origin[last][0]))
        at += len(line) + 1
    return spans


def slow_starts(text: str, tokens: Sequence[Span], words: Sequence[Span]) -> tuple[list[bool], int]:
    """Whether each token starts a word, and how many borders there are at the start of a token: every character tells
    its word, a token joins the words of its characters, and one without any goes with the next token."""
    word_of = {place: number for number, (start, stop) in enumerate(words) for place in range(start, stop)}
    group = list(range(len(words)))
    own: list[int | None] = []
    for start, stop in tokens:
        found = sorted({word_of[place] for place in range(start, stop) if place in word_of})
        for other in found[1:]:
            group = [group[found[0]] if each == group[other] else each for each in group]
        own.append(found[0] if found else None)
    following: int | None = None
    groups: list[int] = []
    for word in reversed(own):
        following = word if word is not None else following
        groups.append(-1 if following is None else group[following])
    groups.reverse()
    groups = [each if each >= 0 or number == 0 else -2 for number, each in enumerate(groups)]
    starts = [number == 0 or each not in (groups[number - 1], -2) for number, each in enumerate(groups)]
    return starts, max(0, len({group[word] for word in own if word is not None}) - 1)


def library_tokens(folder: Path) -> Callable[[str], list[tuple[int, Span]]]:
    """A function that returns the ids of a text and their spans, as the tokenizer's own library gives them."""
    model = folder / "spiece.model"
    if model.is_file():
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

        def pieces(text: str) -> list[tuple[int, Span]]:
            spans = []
            end = 0
            for piece in processor.encode(text, return_type="proto").pieces:
                begin, end = end, end + len(piece.surface)
                spans.append((piece.id, (begin, end)))
            return spans

        return pieces
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(text: str) -> list[tuple[int, Span]]:
        encoding = backend.encode(text, add_special_tokens=False)
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    return tokens


@cache
def _find() -> FindWords:
    return find_word_finder("mecab").finder.build()


def compare(folder: Path, documents: Sequence[str]) -> tuple[int, int]:
    """Compares word starts and ids of `documents` with the slow alignment; returns the counts of borders."""
    encoder: Any = recognise_tokenizer(folder).encoder(folder)
    slow = library_tokens(folder)
    found = inside = 0
    for text in documents:
        encoded = encoder.encode([text], whole=True, spans=True)
        starts, counts = mark_word_starts(encoded, _find()([text]))
        assert np.array_equal(encoded.ids, encoder.encode([text], whole=True).ids)
        expected = slow(text)
        if "<" not in text:  # the libraries do not know which of these pieces Transformers takes for special tokens
            assert [id for id, _ in expected] == encoded.ids.tolist()
            words = slow_words(text)
            slow_flags, borders = slow_starts(text, [span for _, span in expected], words)
            assert starts.tolist() == slow_flags, text
            if encoded.ids.size:
                assert counts[FOUND] == borders
                assert counts[FOUND] + counts[INSIDE] == max(0, len(words) - 1)
        found += counts.get(FOUND, 0)
        inside += counts.get(INSIDE, 0)
    return found, inside


@pytest.mark.parametrize("name", ["sentencepiece", "dummy-prefix", "bytes", "bytes-nfkc", "unigram"])
def test_words_start_where_an_alignment_of_characters_says(name: str, folders: dict[str, Path]) -> None:
    found, inside = compare(folders[name], DOCUMENTS)
    assert found > inside > 0


@pytest.mark.nightly
@pytest.mark.real_data
def test_words_of_real_text_start_where_an_alignment_of_characters_says(tmp_path: Path) -> None:
    """Every vocabulary on 40 documents of each kind of text; a border on the border of two tokens is always found."""
    with gzip.open(real_data("ja-medium.val.jsonl.gz"), "rt", encoding="utf-8") as stream:
        documents = [json.loads(line)["text"][:800] for line in stream][::4]
    vocabularies = {
        "llm-jp-tokenizer/code10K_en20K_ja30K.ver2.2.model": "spiece.model",
        "llm-jp-tokenizer/llm-jp-tokenizer-100k.ver3.0b1.model": "spiece.model",
        "llm-jp-tokenizer/code10K_en20K_ja30K.ver2.2_hf_fast.b4.tokenizer.json.gz": "tokenizer.json",
        "sentencepiece/test_ja_model.model": "spiece.model",
    }
    for number, (name, file) in enumerate(vocabularies.items()):
        source, folder = real_data(f"tokenizers/{name}"), tmp_path / str(number)
        folder.mkdir()
        content = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
        (folder / file).write_bytes(content)
        if file == "tokenizer.json":
            (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        found, inside = compare(folder, documents)
        assert found > 2 * inside > 0
