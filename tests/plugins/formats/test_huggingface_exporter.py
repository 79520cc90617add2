"""AutoTokenizer loads, for every exported model, the tokenizer that the model was trained with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, BertJapaneseTokenizer, BertTokenizer, PreTrainedModel

from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.plugins import registry
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.toolkit.formats import model_folder
from terakoya_contract.toy import make_tokenizer
from terakoya_plugins.formats.huggingface import HuggingFace

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ga", "##ra", "su"]
VOCABULARY = Vocabulary(size=len(WORDS), pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))
SIZES = {
    "hidden_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_hidden_layers": 1, "num_layers": 1, "num_heads": 2,
    "num_attention_heads": 2, "intermediate_size": 8, "num_key_value_heads": 2, "rotary_dim": 2,
}  # fmt: skip


def build(name: str, vocabulary: Vocabulary, **further: float) -> PreTrainedModel:
    """A tiny model of the architecture `name`, with the settings `further` that it has."""
    component = registry().component("architectures", name)
    architecture = component(
        **{key: value for key, value in {**SIZES, **further}.items() if key in component.model_fields}
    )
    return architecture.build(vocabulary, "masked" if "masked" in component.heads else sorted(component.heads)[0])


TAKEN_FOR_ANOTHER = frozenset({"modernbert", "modernbert_decoder", "mistral", "olmo2"})
"""The families for whose folders `AutoTokenizer` takes Transformers' general class, unless the folder's code says
otherwise."""


@pytest.mark.parametrize("name", registry().names("architectures"))
def test_an_export_has_the_tokenizer_of_the_run(name: str, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertJapaneseTokenizer(
        str(tmp_path / "vocab.txt"),
        word_tokenizer_type="basic",
        subword_tokenizer_type="wordpiece",
        do_lower_case=False,
    ).save_pretrained(source)
    HuggingFace().export({"": build(name, VOCABULARY)}, source, tmp_path / "out")
    for options in ({}, {"trust_remote_code": True}):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True, **options)
        assert isinstance(tokenizer, BertJapaneseTokenizer)
        assert tokenizer("gara su [MASK]")["input_ids"] == [2, 5, 6, 7, 4, 3]
    assert (tmp_path / "out" / "tokenization.py").exists() == (name in TAKEN_FOR_ANOTHER)


def test_the_bias_of_robertas_head_has_the_name_that_transformers_4_45_reads_too(tmp_path: Path) -> None:
    model = build("roberta", VOCABULARY)
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.arange(8.0))
    model_folder.write(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["lm_head.decoder.bias"].tolist() == saved["lm_head.bias"].tolist() == list(range(8))
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert again.lm_head.decoder.bias.tolist() == list(range(8))


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama", "qwen3"])
def test_a_decoders_tokenizer_gives_only_inputs_that_it_accepts(name: str, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(source)
    model = build(name, VOCABULARY).eval()
    HuggingFace().export({"": model}, source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    inputs = tokenizer("gara ga", add_special_tokens=False, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[5, 6, 5]] and "token_type_ids" not in inputs
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, model(inputs["input_ids"]).logits)
        generated = model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert generated.shape == (1, 5)


@pytest.mark.parametrize("name", ["bert", "electra", "roberta", "deberta", "deberta_v2", "t5"])
def test_a_model_without_token_types_gets_none(name: str, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(source)
    assert "token_type_ids" in AutoTokenizer.from_pretrained(source).model_input_names
    model = build(name, VOCABULARY).eval()
    HuggingFace().export({"": model}, source, tmp_path / "out")
    pair = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)("ga", "su", return_tensors="pt")
    assert ("token_type_ids" in pair) == (name in ("bert", "electra"))
    if name == "t5":
        assert model.generate(**pair, max_new_tokens=2).shape[0] == 1
    else:
        assert torch.isfinite(model(**pair).logits).all()


@pytest.mark.parametrize("head", ["masked", "pretraining"])
def test_a_japanese_bert_that_was_trained_on_pairs_gets_token_types(head: Any, tmp_path: Path) -> None:
    """Transformers 4 makes them for this tokenizer by default, 5 does not; a masked model has never seen a second."""
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    settings = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic", "do_lower_case": False}
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "subword_tokenizer_type": "wordpiece"}))
    component = registry().component("architectures", "bert")
    sizes = {key: value for key, value in SIZES.items() if key in component.model_fields}
    HuggingFace().export({"": component(**sizes).build(VOCABULARY, head)}, source, tmp_path / "out")
    pair = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)("ga", "su")
    assert pair["input_ids"] == [2, 5, 3, 7, 3]
    assert pair.get("token_type_ids") == ([0, 0, 0, 1, 1] if head == "pretraining" else None)


LONGEST = {"bert": 12, "roberta": 12, "deberta_v2": 12, "modernbert": 12, "llama": 12, "t5": 512}
"""Positions; of deberta_v2, whose positions are relative, what it is configured for; of t5 that of published ones."""


@pytest.mark.parametrize("name", LONGEST)
def test_truncation_cuts_to_the_positions_of_the_model(name: str, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(source)
    model = build(name, VOCABULARY, max_position_embeddings=12).eval()
    HuggingFace().export({"": model}, source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    ids = tokenizer("ga " * 600, truncation=True, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, LONGEST[name])
    if name != "t5":
        with torch.no_grad():
            model(ids)


TEXT = "昨日は雨が降った。 it's <s> 12"


@pytest.mark.parametrize("special_tokens", ["gpt", "bert"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_a_sentencepiece_export_is_fast(
    name: str, special_tokens: str, sentencepiece_folders: dict[str, Path], tmp_path: Path
) -> None:
    source = sentencepiece_folders[special_tokens]
    before = AutoTokenizer.from_pretrained(source, local_files_only=True)
    HuggingFace().export({"": build(name, VOCABULARY)}, source, tmp_path / "out")
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    after = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True, trust_remote_code=False)
    assert after.is_fast and after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    assert len({len(row) for row in after([TEXT, "は"], padding=True)["input_ids"]}) == 1
    encoded = after("ｶﾞｽ、雨が降った", return_offsets_mapping=True)
    assert encoded["offset_mapping"][-1 - (special_tokens == "bert")] == (8, 9)
    assert type(recognise_tokenizer(tmp_path / "out")).__name__ == "SentencePiece"


@pytest.mark.parametrize("special_tokens", ["gpt", "bert"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_a_sentencepiece_export_without_tokenizer_json_is_one_that_transformers_4_knows(
    name: str, special_tokens: str, sentencepiece_folders: dict[str, Path], tmp_path: Path
) -> None:
    """`BertGenerationTokenizer` is in Transformers 4 and 5. None of 4's adds [CLS] and [SEP] to a model's own ids: the
    folder then has the code of one, which 4 runs with trust_remote_code and 5 does not need."""
    source = sentencepiece_folders[f"{special_tokens}, symbols"]
    before = AutoTokenizer.from_pretrained(source, local_files_only=True)
    HuggingFace().export({"": build(name, VOCABULARY)}, source, tmp_path / "out")
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    if special_tokens == "gpt":
        assert written["tokenizer_class"] == "BertGenerationTokenizer" and "special_tokens_pattern" not in written
        assert (tmp_path / "out/spiece.model").read_bytes() == (source / "tokenizer.model").read_bytes()
    else:
        assert written["auto_map"]["AutoTokenizer"][0] == "tokenization.SentencePieceBackend"
        assert "BertGenerationTokenizer" in (tmp_path / "out/tokenization.py").read_text()
    for trust in (False, True):
        after = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True, trust_remote_code=trust)
        assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
        assert after.get_vocab() == before.get_vocab()
        assert len({len(row) for row in after([TEXT, "は"], padding=True)["input_ids"]}) == 1


@pytest.fixture(scope="module")
def sentencepiece_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """special_tokens -> a trained SentencePiece tokenizer; one "with symbols" of the user has no tokenizer.json."""
    root = tmp_path_factory.mktemp("sentencepiece")
    (root / "corpus.txt").write_text("\n\n".join(["昨日は雨が降った。", "今日は晴れて、it's a sunny day 123。"] * 20))
    kind = registry().component("tokenizers", "sentencepiece")
    folders = {}
    for tokens, symbols in itertools.product(("gpt", "bert"), ((), ("雨",))):
        folders[tokens + ", symbols" * len(symbols)] = folder = root / f"{tokens}{len(symbols)}"
        settings = {"special_tokens": tokens, "user_defined_symbols": symbols}
        if symbols:
            settings["model_type"] = "bpe"
        kind(vocab_size=60, hard_vocab_limit=False, **settings).train(Corpus([root / "corpus.txt"]), folder)
    return folders


def test_names_of_transformers_5_become_those_that_4_knows(tmp_path: Path) -> None:
    """Saved by Transformers 5: its class TokenizersBackend, and a list of further special tokens."""
    source = tmp_path / "tokenizer"
    make_tokenizer(source)
    loaded = AutoTokenizer.from_pretrained(source, local_files_only=True)
    loaded.add_special_tokens({"extra_special_tokens": ["w3"]})
    loaded.save_pretrained(source)
    assert json.loads((source / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    HuggingFace().export({"": build("llama", VOCABULARY)}, source, tmp_path / "out")
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["w3"] and "extra_special_tokens" not in written
    after = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert after("w1 w3 w2")["input_ids"] == loaded("w1 w3 w2")["input_ids"]
    assert "w3" in after.all_special_tokens


def test_transformers_4_reads_the_bases_of_rotary_positions(tmp_path: Path) -> None:
    """Transformers 4 knows `rope_theta` and its kin alone; 5 reads `rope_parameters`, and the same from both."""
    expected = {
        "llama": {"rope_theta": 5000.0},
        "modernbert": {"global_rope_theta": 7000.0, "local_rope_theta": 6000.0},
        "gemma3_text": {"rope_theta": 7000.0, "rope_local_base_freq": 6000.0},
    }
    for name, bases in expected.items():
        model = build(name, VOCABULARY, **bases)
        model_folder.write(model, tmp_path / name)
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert {key: written.get(key) for key in bases} == bases
        loaded = AutoConfig.from_pretrained(tmp_path / name, local_files_only=True)
        assert loaded.rope_parameters == model.config.rope_parameters
