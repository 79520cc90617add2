"""SentencePiece models by functions in C: the model's own ids on every text, or not at all."""

from __future__ import annotations

import logging
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from test_sentencepiece import LINES, own
from test_sentencepiece_json import ANY, folder_of, trained

from terakoya.errors import UserError
from terakoya_plugins.tokenizers.sentencepiece import encoder, native
from terakoya_plugins.tokenizers.sentencepiece.native import NativeModel, find_native_model

MODELS: dict[str, dict[str, Any]] = {
    "unigram": {},
    "unigram, bytes, as it is": {
        "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "vocab_size": 1800,
    },
    "unigram, no prefix": {"add_dummy_prefix": False, "normalization_rule_name": "nfkc_cf"},
    "bpe": {"model_type": "bpe", "character_coverage": 0.98},
    "bpe, bytes": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nfkc", "vocab_size": 1800},
    "bpe, other order": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 1800},
}  # fmt: skip


@cache
def model_of(name: str) -> tuple[SentencePieceProcessor, NativeModel]:
    content = trained(**MODELS[name])
    if name == "bpe, other order":  # so pieces are made by merges that come before those of their parts, or not at all
        proto = sentencepiece_model_pb2.ModelProto.FromString(content)
        generator = random.Random(0)
        for piece in proto.pieces:
            piece.score = -generator.randrange(300)
        content = proto.SerializeToString()
    processor = SentencePieceProcessor(model_proto=content)
    model = NativeModel.of(processor)
    assert model is not None
    return processor, model


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(ANY | st.lists(st.sampled_from([*LINES, "  ", "wwww", "\0"]), max_size=5).map("".join), max_size=5)
)
def test_ids_are_those_of_sentencepiece(name: str, texts: list[str]) -> None:
    processor, model = model_of(name)
    assert [row.tolist() for row in model.rows(texts)] == processor.encode(texts)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_found(name: str) -> None:
    assert find_native_model(model_of(name)[0]) is not None


def test_sums_of_long_texts_are_rounded_as_sentencepiece_rounds_them() -> None:
    processor, model = model_of("unigram")
    generator = random.Random(1)
    text = "".join(generator.choices("".join(LINES), k=120_000)) + "w" * 20_000
    assert sum(map(processor.get_score, processor.encode(text))) < -3e5
    np.testing.assert_array_equal(model.rows([text])[0], processor.encode(text))


@pytest.mark.parametrize("name", ["unigram", "bpe, bytes"])
def test_the_encoder_of_prepare_uses_it_for_much_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = own(folder_of(name)).encoder(folder_of(name)).encode(LINES)
    monkeypatch.setattr(encoder, "MUCH_TEXT", 0)
    calls = []
    rows = NativeModel.rows
    monkeypatch.setattr(NativeModel, "rows", lambda *words: calls.append(1) or rows(*words))  # type: ignore[func-returns-value]
    encoded = own(folder_of(name)).encoder(folder_of(name)).encode(LINES)
    assert calls
    np.testing.assert_array_equal(encoded.ids, expected.ids)


def test_other_ids_are_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    processor, _ = model_of("bpe")
    rows = NativeModel.rows
    monkeypatch.setattr(NativeModel, "rows", lambda self, lines: rows(self, [line.replace("習", "") for line in lines]))
    with caplog.at_level(logging.INFO):
        assert find_native_model(processor) is None
    assert "normalise.c is left out, because it has other ids for the text '寺子屋で" in caplog.text
    model = NativeModel.of(processor)
    assert model is not None
    with pytest.raises(
        UserError, match=r"normalise\.c and SentencePiece give other ids for the text '手習い'; export CC"
    ):
        model.encode(["手習い"])


@pytest.mark.parametrize(
    "options", [{"user_defined_symbols": ["です"]}, {"treat_whitespace_as_suffix": True}, {"model_type": "char"}]
)
def test_other_models_are_left_to_sentencepiece(options: dict[str, Any]) -> None:
    assert find_native_model(SentencePieceProcessor(model_proto=trained(**options))) is None


def test_without_a_c_compiler_sentencepiece_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, _ = model_of("bpe")
    monkeypatch.setattr(native, "merge_kernels", lambda: None)
    assert find_native_model(processor) is None


def test_what_cannot_be_encoded_is_left_to_sentencepiece() -> None:
    assert model_of("bpe")[1].encode(["a", "\ud800b"]) is None
