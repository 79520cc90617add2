"""BPE by fastokens or merges.c and unigram models by unigram.c: only where their ids are those of `tokenizers`."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from terakoya.errors import UserError
from terakoya.toolkit.tokenizers import fast_unigram, find_encoder, line_encoder
from terakoya.toolkit.tokenizers.find_encoder import find_fast_encoder
from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

fastokens = pytest.importorskip("fastokens")


@pytest.fixture(autouse=True, scope="module")
def _every_batch_is_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_encoder, "MANY_CHARACTERS", 0)
        yield


TEXTS = [
    "川べりの道を歩くと、風が麦の匂いを運んできた。川べりの道。",
    "They've said it's all right; I'LL say we'd 12345 times.\n  two  spaces \n\n end",
    "か\u3099𠮷👨‍👩‍👧\0後ろ \u2028 e\u0301 <think>道</think><|end|><|end|> x",
]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(kind: str = "gpt2") -> Backend:
    backend = Backend(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    backend.pre_tokenizer = level
    if kind == "qwen":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS * 2, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return backend


def unigram(*, in_bytes: bool) -> Backend:
    """A model with LLM-jp's normalizer: all parts of words of the texts, many of them equally probable."""
    runs = {text[start : start + size] for text in TEXTS for start in range(len(text)) for size in (1, 2, 3)}
    kept = sorted(run.replace(" ", "▁") for run in runs if run not in ("𠮷", "x", "道"))
    byte_pieces = [(f"<0x{byte:02X}>", -9.5) for byte in range(256)] if in_bytes else []
    scores = itertools.cycle((-3.25, -5.5, -8.75, -7.1, -6.3, -9.9, -4.7))
    pieces = [("<unk>", 0.0), ("<|end|>", 0.0), *byte_pieces, ("▁", -2.0), *zip(kept, scores, strict=False)]
    backend = Backend(models.Unigram(pieces, 0, in_bytes))
    backend.normalizer = normalizers.Sequence([
        normalizers.Replace(Regex(r"(?<!\n)^"), "▁"), normalizers.Replace(Regex(" "), "▁")
    ])  # fmt: skip
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def characters(*, in_bytes: bool) -> Backend:
    """BPE of characters, without words."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=in_bytes))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)] if in_bytes else []
    known = [text.replace("道", "") for text in TEXTS]
    trainer = trainers.BpeTrainer(
        vocab_size=420 if in_bytes else 160, special_tokens=["<unk>", "<|end|>", *byte_pieces], show_progress=False
    )
    backend.train_from_iterator([*known[:2], *known], trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    content = json.loads(backend.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"][:3] != "<0x"]
    return Backend.from_str(json.dumps(content))


def encoder_of(backend: Backend, *, parse: bool = True) -> LineEncoder:
    return LineEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"), parse=parse)


BACKENDS = {kind: trained(kind).to_str() for kind in ("gpt2", "qwen")}
BACKENDS |= {f"characters, {way}": characters(in_bytes=way == "bytes").to_str() for way in ("bytes", "unknown")}
BACKENDS |= {"bytes": unigram(in_bytes=True).to_str(), "unknown": unigram(in_bytes=False).to_str()}
ENCODERS = {
    (kind, parse): encoder_of(Backend.from_str(BACKENDS[kind]), parse=parse)
    for kind, parse in itertools.product(BACKENDS, (True, False))
}


@settings(deadline=None)
@given(
    st.sampled_from(sorted(ENCODERS)),
    st.lists(st.one_of(st.text(max_size=40), st.lists(st.sampled_from([*TEXTS, " ", "<|end|>", "は"])).map("".join))),
)
def test_ids_are_those_of_tokenizers(key: tuple[str, bool], texts: list[str]) -> None:
    assert ENCODERS[key]._fast is not None
    encoded = ENCODERS[key].encode([*texts, *TEXTS], whole=True)
    backend = Backend.from_str(BACKENDS[key[0]])
    backend.encode_special_tokens = not key[1]
    rows = [each.ids for each in backend.encode_batch([*texts, *TEXTS], add_special_tokens=False)]
    assert encoded.ids.tolist() == [*itertools.chain.from_iterable(rows)]
    assert encoded.document_lines.tolist() == [bool(row) for row in rows]


def test_without_fastokens_tokenizers_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ENCODERS["gpt2", True].encode(TEXTS)
    monkeypatch.setitem(sys.modules, "fastokens", None)
    encoder = encoder_of(Backend.from_str(BACKENDS["gpt2"]))
    assert encoder._fast is None
    np.testing.assert_array_equal(encoder.encode(TEXTS).ids, expected.ids)


class OtherIds:
    """fastokens with one more id for a text with the letter 習."""

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def encode_batch_flat(self, texts: list[str], **options: Any) -> tuple[bytes, bytes]:
        return self._fast.encode_batch_flat([text.replace("習", "習a") for text in texts], **options)


@pytest.fixture
def other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        @staticmethod
        def from_json_str(json: str, read: Any = fastokens.Tokenizer.from_json_str) -> OtherIds:
            return OtherIds(read(json))

    monkeypatch.setattr(fastokens, "Tokenizer", Tokenizer)


def test_other_ids_in_the_sample_are_noticed(other_ids: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert encoder_of(Backend.from_str(BACKENDS["gpt2"]))._fast is None
    assert "fastokens is left out, because it has other ids for the text '寺子屋で" in caplog.text


def test_other_ids_later_are_an_error(other_ids: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_encoder, "_ODD", ())
    encoder = encoder_of(Backend.from_str(BACKENDS["gpt2"]))
    assert encoder._fast is not None
    encoder.encode(["川べりの道"])
    with pytest.raises(UserError, match="fastokens and tokenizers give other ids for the text '手習い'"):
        encoder.encode(["手習い"])


def test_added_tokens_that_take_their_neighbours_are_left_to_tokenizers() -> None:
    backend = Backend.from_str(BACKENDS["gpt2"])
    backend.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    assert find_fast_encoder(backend, split=False) is None


def test_a_model_that_it_cannot_read_is_left_to_tokenizers() -> None:
    backend = Backend.from_str(BACKENDS["gpt2"])
    backend.normalizer = normalizers.NFKC()
    assert find_fast_encoder(backend, split=False) is None
    assert find_fast_encoder(Backend(models.WordLevel({"<unk>": 0}, "<unk>")), split=False) is None
    backend = Backend.from_str(BACKENDS["bytes"])
    backend.normalizer = normalizers.Replace(Regex("a|b"), "c")
    assert find_fast_encoder(backend, split=False) is None
    backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.Metaspace()
    assert find_fast_encoder(backend, split=False) is None


def test_without_a_c_compiler_tokenizers_encodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fast_unigram.unigram_kernels.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_fast_encoder(Backend.from_str(BACKENDS["bytes"]), split=False) is None
    fast_unigram.unigram_kernels.cache_clear()


def test_tokenizers_says_why_a_text_cannot_be_encoded() -> None:
    for kind in ("gpt2", "bytes"):
        with pytest.raises(TypeError, match="TextEncodeInput"):
            ENCODERS[kind, True].encode(["a", "\ud800b"])


def test_a_short_text_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_encoder, "MANY_CHARACTERS", 10)
    encoder = encoder_of(Backend.from_str(BACKENDS["gpt2"]))
    short = encoder.encode(["川べりの道"])
    assert "_fast" not in vars(encoder)
    np.testing.assert_array_equal(encoder.encode(["川べりの道", "川べりの道"]).ids, [*short.ids, *short.ids])
    assert "_fast" in vars(encoder)


def test_the_environment_is_as_it_was() -> None:
    before = dict(os.environ)
    find_fast_encoder(Backend.from_str(BACKENDS["gpt2"]), split=False)
    assert dict(os.environ) == before
