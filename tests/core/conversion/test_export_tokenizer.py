"""The tokenizer of an export is that of its source, fitted to the model, and no code of the source runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaTokenizer,
)

from terakoya.toolkit.formats import transformers_folder

SIZES = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 66,
}  # fmt: skip
PIECES = {piece: number for number, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefg"])}
BYTES = {piece: number for number, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefg"])}


def make_folder(folder: Path, kind: str, settings: Mapping[str, Any]) -> Path:
    """A model with its tokenizer in tokenizer.json, and `settings` as its tokenizer_config.json."""
    if kind == "bert":
        BertForMaskedLM(BertConfig(vocab_size=len(PIECES), **SIZES)).save_pretrained(folder)
        BertTokenizer(vocab=PIECES).save_pretrained(folder)
    else:
        RobertaForMaskedLM(RobertaConfig(vocab_size=len(BYTES), **SIZES)).save_pretrained(folder)
        RobertaTokenizer(vocab=BYTES, merges=[]).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_texts_are_cut_where_the_positions_of_the_model_end(tmp_path: Path) -> None:
    """Also where the tokenizer is from a model with fewer, whose rows have become longer."""
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 16}
    source = make_folder(tmp_path / "bert", "bert", settings)
    transformers_folder.write(BertForMaskedLM.from_pretrained(source), source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer("a " * 100, truncation=True)["input_ids"]) == SIZES["max_position_embeddings"]
