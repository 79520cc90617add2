"""AutoTokenizer loads, for every exported model, the tokenizer that the model was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, BertJapaneseTokenizer, BertTokenizer, PreTrainedModel

from terakoya.components.vocabulary import Vocabulary
from terakoya.plugins import registry
from terakoya.toolkit.formats import model_folder
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
    assert (tmp_path / "out" / "tokenization.py").exists() == (name == "modernbert")


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


LONGEST = {"bert": 12, "roberta": 12, "deberta_v2": None, "modernbert": 12, "llama": 12, "t5": None}


@pytest.mark.parametrize("name", LONGEST)
def test_truncation_cuts_to_the_positions_of_the_model(name: str, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(source)
    model = build(name, VOCABULARY, max_position_embeddings=12).eval()
    HuggingFace().export({"": model}, source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    ids = tokenizer("ga " * 40, truncation=LONGEST[name] is not None, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, LONGEST[name] or 42)
    if name != "t5":
        with torch.no_grad():
            model(ids)


def test_transformers_4_reads_the_bases_of_rotary_positions(tmp_path: Path) -> None:
    """Transformers 4 knows `rope_theta` and its kin alone; 5 reads `rope_parameters`, and the same from both."""
    expected = {
        "llama": {"rope_theta": 5000.0},
        "modernbert": {"global_rope_theta": 7000.0, "local_rope_theta": 6000.0},
    }
    for name, bases in expected.items():
        model = build(name, VOCABULARY, **bases)
        model_folder.write(model, tmp_path / name)
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert {key: written.get(key) for key in bases} == bases
        loaded = AutoConfig.from_pretrained(tmp_path / name, local_files_only=True)
        assert loaded.rope_parameters == model.config.rope_parameters
