"""Exports for ONNX Runtime, llama.cpp and sentence-transformers.

What needs one of these programs is skipped where it is not installed; `make nightly` runs it where it is.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_exports import make_model, train_tokenizer
from transformers import AutoTokenizer

from terakoya.contract import toy
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.toolkit.formats import other_programs
from terakoya_plugins.formats.gguf import vocabulary, weights
from terakoya_plugins.formats.gguf.exporter import GgufExporter
from terakoya_plugins.formats.onnx import OnnxExporter
from terakoya_plugins.formats.sentence_transformers import SentenceTransformersExporter


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("onnx", 'needs onnx, onnxscript, onnxruntime: pip install "terakoya[onnx]"'),
        ("gguf", 'needs gguf: pip install "terakoya[gguf]"'),
        ("sentence_transformers", 'sentence_transformers: pip install "terakoya[sentence-transformers]"'),
    ],
)
def test_a_missing_library_is_named_before_anything_is_read(
    format: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as raised:
        export(tmp_path / "no-run", tmp_path / "out", format=format)
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_outputs_that_are_too_far_or_not_numbers_are_refused() -> None:
    expected = np.array([[2.0, -4.0]])
    assert "5.0e-05" in other_programs.compare_outputs("it", "logits", expected + np.array([[0, 2e-4]]), expected)
    for wrong in (expected + np.array([[0, 5e-4]]), expected * np.nan, expected[0]):
        with pytest.raises(UserError, match="logits"):
            other_programs.compare_outputs("it", "logits", wrong, expected)


# ------------------------------------------------------------------------------------------------ sentence-transformers


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False), ("max", True)])
def test_sentence_transformers_gets_modules_and_their_settings(pooling: Any, normalize: bool, tmp_path: Path) -> None:
    source = toy.make_tokenizer(tmp_path / "tokenizer")
    model = make_model("bert", "masked", source, "huggingface")
    exporter = SentenceTransformersExporter(pooling=pooling, normalize=normalize)
    out = tmp_path / "out"
    exporter.export({"": model}, source, out)
    read = {file: json.loads((out / file).read_text()) for file in ("modules.json", "sentence_bert_config.json")}
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    assert [each["type"] for each in read["modules.json"]] == [f"sentence_transformers.models.{name}" for name in names]
    assert all((out / each["path"]).is_dir() for each in read["modules.json"])
    assert read["sentence_bert_config.json"]["max_seq_length"] == 96
    modes = json.loads((out / "1_Pooling" / "config.json").read_text())
    chosen = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}[pooling]
    assert modes.pop("word_embedding_dimension") == 16
    assert [name for name, is_chosen in modes.items() if is_chosen] == [f"pooling_mode_{chosen}"]
    assert "(2, 16)" in (out / "README.md").read_text() and "96 tokens" in (out / "README.md").read_text()


def test_sentence_transformers_refuses_what_continues_texts(tmp_path: Path) -> None:
    source = toy.make_tokenizer(tmp_path / "tokenizer")
    model = make_model("gpt2", "causal", source, "huggingface")
    with pytest.raises(UserError, match="expected an encoder, got GPT2LMHeadModel"):
        SentenceTransformersExporter().export({"": model}, source, tmp_path / "out")


@pytest.mark.nightly
@needs("sentence_transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("name", ["bert", "electra", "roberta", "deberta", "deberta_v2", "modernbert"])
def test_sentence_transformers_gives_the_pooled_hidden_states(name: str, pooling: Any, tmp_path: Path) -> None:
    source = train_tokenizer(tmp_path / "tokenizer", "mecab_wordpiece", vocab_size=100)
    model = make_model(name, "masked", source, "mecab_wordpiece")
    exporter = SentenceTransformersExporter(pooling=pooling, normalize=False)
    exporter.export({"": model}, source, tmp_path / "out")
    assert len(exporter.compare({"": model}, source, tmp_path / "out")) == 1
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(tmp_path / "out"), device="cpu", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    with torch.no_grad():
        hidden = model.base_model(**tokenizer("雨が降る。", return_tensors="pt")).last_hidden_state[0]
    expected = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0)}[pooling]
    np.testing.assert_allclose(loaded.encode("雨が降る。"), expected.numpy(), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------- ONNX


@pytest.mark.nightly
@needs("onnx", "onnxscript", "onnxruntime")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert", "masked"), ("bert", "pretraining"), ("electra", "discriminator"), ("roberta", "masked"),
        ("deberta", "masked"), ("deberta_v2", "masked"), ("modernbert", "masked"), ("t5", "seq2seq"),
        ("gpt2", "causal"), ("gptj", "causal"), ("llama", "causal"), ("qwen3", "causal"),
    ],
)  # fmt: skip
def test_onnx_runtime_computes_every_family(name: str, head: Any, tmp_path: Path) -> None:
    source = train_tokenizer(tmp_path / "tokenizer", "mecab_wordpiece", vocab_size=100)
    model = make_model(name, head, source, "mecab_wordpiece")
    exporter = OnnxExporter()
    exporter.export({"": model}, source, tmp_path / "out")
    assert exporter.compare({"": model}, source, tmp_path / "out")
    files = {file.name for file in (tmp_path / "out").glob("*.onnx")}
    assert files == ({"encoder_model.onnx", "decoder_model.onnx"} if name == "t5" else {"model.onnx"})
    assert "onnxruntime" in (tmp_path / "out" / "README.md").read_text()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(UserError, match="differ from the model's"):
        exporter.compare({"": model}, source, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize(
    ("name", "head", "further", "message"),
    [
        ("bert", "masked", {}, "got BertForMaskedLM"),
        ("gptj", "causal", {}, "got GPTJForCausalLM"),
        ("llama", "causal", {"hidden_act": "gelu"}, "does not have gelu"),
        ("gpt2", "causal", {"activation_function": "relu"}, "does not have relu"),
        ("qwen3", "causal", {"use_sliding_window": True}, "a sliding window"),
        ("qwen3", "causal", {"attention_bias": True}, "biases"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    name: str, head: Any, further: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model(name, head, toy.make_tokenizer(tmp_path / "tokenizer"), "huggingface", **further)
    with pytest.raises(UserError, match=message):
        weights.check_model(model)


def test_rows_are_interleaved_as_rotary_pairs() -> None:
    head = torch.arange(6.0)[:, None] + torch.tensor([[0.0, 100.0]])  # rows i and i + 3 rotate together
    both = torch.cat([head, head + 10])
    assert weights.interleave(both, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15]


def test_words_of_mecab_cannot_be_in_gguf(tmp_path: Path) -> None:
    source = train_tokenizer(tmp_path / "tokenizer", "mecab_wordpiece", vocab_size=100)
    with pytest.raises(UserError, match="BertJapaneseTokenizer, which needs a morphological analyser"):
        vocabulary.write_vocabulary(None, source, 100, allow_unnormalized=True)  # type: ignore[arg-type]


SENTENCEPIECE: dict[str, Any] = {"vocab_size": 340, "character_coverage": 1.0, "hard_vocab_limit": False}
PLAIN: dict[str, Any] = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@needs("gguf")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "bpe", "byte_fallback": True}, "does not normalise text"),
        ({"model_type": "bpe", **PLAIN}, "only with byte_fallback"),
        ({"byte_fallback": True}, "only without byte_fallback"),
        ({"model_type": "char"}, "this is another one"),
        ({"add_dummy_prefix": False}, "puts a space before each text"),
    ],
)
def test_a_sentencepiece_model_that_llama_cpp_splits_otherwise_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = train_tokenizer(tmp_path / "tokenizer", "sentencepiece", **SENTENCEPIECE, **settings)
    model = make_model("llama", "causal", source, "sentencepiece")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=message):
        GgufExporter().export({"": model}, source, tmp_path / "out")


@pytest.mark.nightly
@needs("gguf", "llama_cpp")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("type", "settings"),
    [
        ("byte_bpe", {"vocab_size": 300}),
        ("sentencepiece", SENTENCEPIECE),
        ("sentencepiece", {**SENTENCEPIECE, **PLAIN, "model_type": "bpe", "byte_fallback": True}),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_llama_cpp_gives_the_ids_and_logits(name: str, type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    source = train_tokenizer(tmp_path / "tokenizer", type, **settings)
    model = make_model(name, "causal", source, type)
    (tmp_path / "out").mkdir()
    exporter = GgufExporter()
    exporter.export({"": model}, source, tmp_path / "out")
    sentences = exporter.compare({"": model}, source, tmp_path / "out")
    assert "6 of 6 texts" in sentences[0] and "logits" in sentences[1]
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(UserError, match="differ from the model's"):
        exporter.compare({"": model}, source, tmp_path / "out")
