"""Pieces of different tokenizers compare by the texts that they stand for."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from terakoya.toolkit.initializers.pieces import Pieces, PieceText
from terakoya_contract import toy


def pieces_of(model: models.Model, **roles: str) -> Pieces:
    return Pieces(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **roles))


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    words = ["[UNK]", "[PAD]", "東", "京", "##京", "都", "the", "##re", "re", "東京"]
    folder = toy.make_wordpiece(tmp_path_factory.mktemp("pieces") / "words", words)
    return Pieces(PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.fixture(scope="module")
def unigram() -> Pieces:
    scores = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("re", -3.0), ("東", -4.0), ("京", -4.0), ("<0xE9>", -9.0)]
    return pieces_of(models.Unigram(scores, unk_id=0), unk_token="<unk>")


@pytest.fixture(scope="module")
def byte_level() -> Pieces:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {piece: id for id, piece in enumerate([*alphabet, "Ġt", "æĿ", "æĿ±"])}
    return pieces_of(models.BPE(ids, [("Ġ", "t"), ("æ", "Ŀ"), ("æĿ", "±")]))


def names(pieces: Pieces, ids: list[int]) -> list[str]:
    by_id = {id: piece for piece, id in pieces.ids.items()}
    return [by_id[id] for id in ids]


def test_a_piece_stands_for_its_text(wordpiece: Pieces, unigram: Pieces, byte_level: Pieces) -> None:
    assert (wordpiece.marks, unigram.marks, byte_level.marks) == ("inside", "space", "bytes")
    assert wordpiece.texts[wordpiece.ids["##re"]] == PieceText(b"re", False)
    assert wordpiece.texts[wordpiece.ids["東京"]] == PieceText("東京".encode(), True)
    assert unigram.texts[unigram.ids["▁the"]] == PieceText(b"the", True)
    assert unigram.texts[unigram.ids["東"]] == PieceText("東".encode(), None)
    assert unigram.texts[unigram.ids["<0xE9>"]] == PieceText(b"\xe9", False)
    assert unigram.texts[unigram.ids["▁"]] == PieceText(b" ", False)
    assert byte_level.texts[byte_level.ids["æĿ"]] == PieceText("東".encode()[:2], False)
    assert byte_level.texts[byte_level.ids["Ġt"]] == PieceText(b"t", True)
    assert 0 not in wordpiece.texts and 0 not in unigram.texts  # special


def test_the_same_text_is_found_in_another_vocabulary(wordpiece: Pieces, unigram: Pieces, byte_level: Pieces) -> None:
    for source, piece, target, expected in (
        (wordpiece, "the", unigram, "▁the"),
        (wordpiece, "##re", unigram, "re"),
        (wordpiece, "東", unigram, "東"),
        (wordpiece, "##京", unigram, "京"),
        (wordpiece, "東", byte_level, "æĿ±"),
        (unigram, "re", wordpiece, "##re"),
        (unigram, "▁the", wordpiece, "the"),
        (unigram, "京", wordpiece, "京"),
        (unigram, "<0xE9>", byte_level, "é"),
        (byte_level, "æĿ±", unigram, "東"),
    ):
        found = target.find(source.texts[source.ids[piece]])
        assert found is not None and names(target, [found]) == [expected], piece
    assert unigram.find(wordpiece.texts[wordpiece.ids["東京"]]) is None


def test_a_text_is_divided_as_the_tokenizer_divides_it(wordpiece: Pieces, unigram: Pieces, byte_level: Pieces) -> None:
    assert names(wordpiece, wordpiece.divide(PieceText("東京京".encode(), None))) == ["東京", "##京"]
    assert names(wordpiece, wordpiece.divide(PieceText("京京".encode(), False))) == ["##京", "##京"]
    assert names(unigram, unigram.divide(PieceText("東京".encode(), True))) == ["東", "京"]
    assert names(unigram, unigram.divide(PieceText(b"there", True))) == ["▁the", "re"]
    assert names(byte_level, byte_level.divide(PieceText("東東".encode(), None))) == ["æĿ±", "æĿ±"]
    assert names(byte_level, byte_level.divide(PieceText("東".encode()[1:], False))) == ["Ŀ", "±"]
    assert unigram.divide(PieceText("鯨".encode()[1:], None)) == []
