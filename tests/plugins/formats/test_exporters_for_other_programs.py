"""Exports for ONNX Runtime, llama.cpp and sentence-transformers.

What needs one of these programs is skipped where it is not installed; `make nightly` runs it in an environment that has
them (tests/tools/test_real_programs.py).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hard_lines import LINES
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tiny_exports import TEXT, make_model, train_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.toolkit.formats import other_programs
from terakoya_contract import toy
from terakoya_conversations.chat_template import find_template
from terakoya_plugins.formats.gguf import families, vocabulary, weights
from terakoya_plugins.formats.gguf.exporter import GgufExporter
from terakoya_plugins.formats.onnx import OnnxExporter
from terakoya_plugins.formats.sentence_transformers import SentenceTransformersExporter


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def change(model: PreTrainedModel) -> None:
    """Gives `model` other embeddings; a number that is added to all of them would be gone after a norm."""
    weight = next(model.parameters())
    weight.data.add_(torch.randn_like(weight))


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
    readme = (out / "README.md").read_text()
    assert "(2, 16)" in readme and "96 tokens" in readme
    assert "The model has been trained" not in readme, "the objective may have been `contrastive`"


def test_sentence_transformers_refuses_what_continues_texts(tmp_path: Path) -> None:
    source = toy.make_tokenizer(tmp_path / "tokenizer")
    model = make_model("gpt2", "causal", source, "huggingface")
    with pytest.raises(UserError, match="expected an encoder, got GPT2LMHeadModel"):
        SentenceTransformersExporter().export({"": model}, source, tmp_path / "out")


@pytest.mark.nightly
@needs("sentence_transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("name", ["bert", "electra", "roberta", "deberta", "deberta_v2", "modernbert", "eurobert"])
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
        ("eurobert", "masked"), ("gpt2", "causal"), ("gptj", "causal"), ("llama", "causal"), ("qwen3", "causal"),
        ("modernbert_decoder", "causal"), ("mistral", "causal"), ("olmo2", "causal"), ("gemma3_text", "causal"),
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
    change(model)
    with pytest.raises(UserError, match="differ from the model's"):
        exporter.compare({"": model}, source, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------- GGUF


LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 24}
YARN_OTHERWISE: dict[str, Any] = {**YARN, "attention_factor": 0.8, "beta_fast": 8.0, "beta_slow": 0.5}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 4, "original_max_position_embeddings": 24, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "head", "further", "message"),
    [
        ("bert", "masked", {}, "got BertForMaskedLM"),
        ("gptj", "causal", {}, "got GPTJForCausalLM"),
        ("llama", "causal", {"hidden_act": "gelu"}, "does not have gelu"),
        ("gpt2", "causal", {"activation_function": "relu"}, "does not have relu"),
        ("qwen3", "causal", {"use_sliding_window": True}, "a sliding window"),
        ("qwen3", "causal", {"attention_bias": True}, "biases"),
        ("qwen3", "causal", {"rope_scaling": LLAMA3}, "qwen3 does not have rotary positions of type llama3"),
        ("gemma3_text", "causal", {"rope_scaling": YARN}, "gemma3 does not have rotary positions of type yarn"),
        ("gemma3_text", "causal", {"query_pre_attn_scalar": 4}, "query_pre_attn_scalar 4, only 8"),
        ("mistral", "causal", {"sliding_window": 95}, "llama does not have a sliding window"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    name: str, head: Any, further: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model(name, head, toy.make_tokenizer(tmp_path / "tokenizer"), "huggingface", **further)
    with pytest.raises(UserError, match=message):
        families.check_model(model)


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


def train_split_bpe(
    folder: Path, pattern: str, *, normalize: bool = False, ignore_merges: bool = False, lines: Sequence[str] = ()
) -> Path:
    """A byte-level BPE whose words `pattern` splits, as the tokenizers of Qwen and Llama 3 are saved. With `lines`, its
    merges are those of whole lines."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Sequence([split, bytes_])
    backend.pre_tokenizer = bytes_ if lines else words
    backend.decoder = decoders.ByteLevel()
    if normalize:
        backend.normalizer = normalizers.NFC()
    backend.train_from_iterator(
        lines or [TEXT * 3],
        trainers.BpeTrainer(
            vocab_size=2000 if lines else 300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.pre_tokenizer = words
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("pattern", "settings", "name"),
    [
        (vocabulary.QWEN, {}, "qwen2"), (vocabulary.LLAMA3, {"ignore_merges": True}, "llama-bpe"),
        (vocabulary.LLAMA3, {}, "dbrx"), (vocabulary.GPT2, {}, "gpt-2"),
        (vocabulary.QWEN, {"ignore_merges": True}, None), (r"\s+", {}, None),
    ],
)  # fmt: skip
def test_a_pattern_gets_the_name_that_llama_cpp_gives_it(
    pattern: str, settings: dict[str, bool], name: str | None, tmp_path: Path
) -> None:
    folder = train_split_bpe(tmp_path, pattern, **settings)
    assert vocabulary.find_pattern(json.loads((folder / "tokenizer.json").read_text())) == name


def test_a_space_before_the_text_has_no_name_in_llama_cpp(tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path / "tokenizer", "byte_bpe", vocab_size=300, add_prefix_space=True)
    assert vocabulary.find_pattern(json.loads((folder / "tokenizer.json").read_text())) is None


@needs("gguf")
def test_a_byte_level_tokenizer_that_normalises_is_refused_unless_texts_are_normalised_before(tmp_path: Path) -> None:
    source = train_split_bpe(tmp_path / "tokenizer", vocabulary.QWEN, normalize=True)
    model = make_model("qwen3", "causal", source, "huggingface")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="does not normalise text for byte-level BPE, and this tokenizer has NFC"):
        GgufExporter().export({"": model}, source, tmp_path / "out")
    GgufExporter(allow_unnormalized=True).export({"": model}, source, tmp_path / "out")
    assert 'unicodedata.normalize("NFC", text)`.' in (tmp_path / "out" / "README.md").read_text()


TAGS = """{% for each in messages %}
  {% if each['role'] == 'assistant' %}
    {%- generation +%}  {{ each['content'] + eos_token }} {%+ endgeneration %}
    {% generation %}
  !
    {% endgeneration %}
  {% else %}
  ? {{ each['content'] }}
  {% endif %}
{% endfor %}"""


@pytest.mark.parametrize("template", ["alpaca", "alpaca_en", TAGS])
def test_the_chat_template_renders_in_plain_jinja_as_in_transformers(template: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(train_split_bpe(tmp_path, vocabulary.GPT2))
    tokenizer.chat_template = template if template == TAGS else find_template(template, tokenizer, tmp_path).text
    turns = [{"role": "user", "content": "雨?"}, {"role": "assistant", "content": "はい"}]
    writer = mock.Mock()
    vocabulary._write_chat_template(writer, tokenizer)
    ((written,),) = writer.add_chat_template.call_args.args
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(written["template"])
    text = plain.render(messages=turns, eos_token=tokenizer.eos_token)
    assert written["name"] == "default" and text == tokenizer.apply_chat_template(turns, tokenize=False)


@needs("gguf")
def test_the_chat_template_is_in_the_file(tmp_path: Path) -> None:
    from gguf import GGUFReader

    source = train_split_bpe(tmp_path / "tokenizer", vocabulary.GPT2)
    (source / "chat_template.jinja").write_text(TAGS, encoding="utf-8")
    (tmp_path / "out").mkdir()
    GgufExporter().export({"": make_model("llama", "causal", source, "huggingface")}, source, tmp_path / "out")
    field = GGUFReader(tmp_path / "out/model.gguf").get_field("tokenizer.chat_template")
    assert field is not None and field.contents() == vocabulary._as_plain_jinja(TAGS)
    end = GGUFReader(tmp_path / "out/model.gguf").get_field("tokenizer.ggml.eot_token_id")
    assert end is not None and end.contents() == AutoTokenizer.from_pretrained(source).eos_token_id


def compare_with_llama_cpp(model: PreTrainedModel, source: Path, out: Path, **settings: Any) -> None:
    """Exports `model`, compares, and sees a changed model refused."""
    out.mkdir()
    exporter = GgufExporter(**settings)
    exporter.export({"": model}, source, out)
    sentences = exporter.compare({"": model}, source, out)
    assert "6 of 6 texts" in sentences[0] and "logits" in sentences[1]
    change(model)
    with pytest.raises(UserError, match="differ from the model's"):
        exporter.compare({"": model}, source, out)


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
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3", "olmo2", "gemma3_text"])
def test_llama_cpp_gives_the_ids_and_logits(name: str, type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    source = train_tokenizer(tmp_path / "tokenizer", type, **settings)
    compare_with_llama_cpp(make_causal(name, source, type), source, tmp_path / "out")


@pytest.mark.nightly
@needs("gguf", "llama_cpp")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        *((name, scaling) for name in ("llama", "mistral") for scaling in (LINEAR, YARN, YARN_OTHERWISE, LLAMA3)),
        *((name, scaling) for name in ("qwen3", "olmo2") for scaling in (LINEAR, YARN, YARN_OTHERWISE)),
        ("gemma3_text", LINEAR),
    ],
)
def test_llama_cpp_scales_rotary_positions(name: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    source = train_tokenizer(tmp_path / "tokenizer", "byte_bpe", vocab_size=300)
    compare_with_llama_cpp(make_causal(name, source, "byte_bpe", rope_scaling=scaling), source, tmp_path / "out")


@pytest.mark.nightly
@needs("gguf", "llama_cpp")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        (vocabulary.QWEN, {}), (vocabulary.QWEN, {"normalize": True}), (vocabulary.LLAMA3, {"ignore_merges": True}),
        (vocabulary.LLAMA3, {}),
    ],
)  # fmt: skip
def test_llama_cpp_splits_by_the_patterns_of_qwen_and_llama_3(
    pattern: str, settings: dict[str, bool], tmp_path: Path
) -> None:
    source = train_split_bpe(tmp_path / "tokenizer", pattern, **settings)
    model = make_causal("llama", source, "huggingface")
    compare_with_llama_cpp(model, source, tmp_path / "out", allow_unnormalized=settings.get("normalize", False))


@pytest.mark.nightly
@needs("gguf", "llama_cpp")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("pattern", "ignore_merges", "name"),
    [
        (vocabulary.GPT2, False, "gpt-2"), (vocabulary.QWEN, False, "qwen2"), (vocabulary.LLAMA3, True, "llama-bpe"),
        (vocabulary.LLAMA3, False, "dbrx"),
    ],
)  # fmt: skip
def test_llama_cpp_splits_hard_lines_as_the_pattern_does(
    pattern: str, ignore_merges: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merges are learned from whole lines, so a border that one of the two does not see gives other ids."""
    source = train_split_bpe(tmp_path / "tokenizer", pattern, ignore_merges=ignore_merges, lines=LINES * 3)
    model, tokenizer = make_causal("llama", source, "huggingface"), AutoTokenizer.from_pretrained(source)
    assert differing_lines(model, source, tokenizer, tmp_path / "out") == []
    other = "gpt-2" if name == "qwen2" else "qwen2"
    monkeypatch.setattr(vocabulary, "PATTERNS", {(pattern, ignore_merges): other})
    assert len(differing_lines(model, source, tokenizer, tmp_path / "other")) > 5


def differing_lines(model: PreTrainedModel, source: Path, tokenizer: Any, out: Path) -> list[str]:
    """The lines that have other ids in llama.cpp."""
    from llama_cpp import Llama

    out.mkdir()
    GgufExporter().export({"": model}, source, out)
    program = Llama(str(next(out.glob("*.gguf"))), vocab_only=True, verbose=False)
    ids = [program.tokenize(line.encode(), add_bos=True, special=True) for line in LINES]
    program.close()
    return [line for line, got in zip(LINES, ids, strict=True) if got != list(tokenizer(line)["input_ids"])]


def make_causal(name: str, source: Path, type: str, **further: Any) -> PreTrainedModel:
    """A tiny causal model that llama.cpp has; Mistral's without a window, which it does not have."""
    windows = {"sliding_window": None} if name == "mistral" else {}
    return make_model(name, "causal", source, type, **windows, **further)
