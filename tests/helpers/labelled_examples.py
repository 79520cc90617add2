"""Toy examples for fine-tuning, and a tiny masked model that can learn them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

WORDS = ["kami", "ton", "kato", "nemi", "saru", "yohi", "hika", "mi", "kaka", "toto"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_model(folder: Path) -> Path:
    """A masked model as it is exported: without a pooler, with random weights."""
    pieces = Tokenizer(WordLevel({piece: number for number, piece in enumerate([*SPECIAL, *WORDS])}, "[UNK]"))
    pieces.pre_tokenizer = Whitespace()
    pieces.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=pieces, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=15, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, hidden_dropout_prob=0.05, initializer_range=0.2,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def classified(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts that are "good" where they contain "ton"."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        words = [draw.choice([word for word in WORDS if word != "ton"]) for _ in range(draw.randint(2, 6))]
        if number % 2:
            words[draw.randrange(len(words))] = "ton"
        rows.append({"text": " ".join(words), "label": "good" if number % 2 else "bad"})
    return rows
