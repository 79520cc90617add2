"""Tiny models of every family and tokenizers trained in a moment, for tests of exporters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from terakoya.components.architecture import Head
from terakoya.corpus.corpus import Corpus
from terakoya.plugins import registry
from terakoya.plugins.create import create_component
from terakoya_contract import toy

TEXT = "図書館で借りた本を、電車の中で読み終えた。\n\n雨が降る。二つの空白、it's 3.14 % of all the dogs.\n\n"


def train_tokenizer(folder: Path, type: str, **settings: Any) -> Path:
    """Trains a tokenizer on two sentences into `folder`."""
    corpus = folder.with_name(f"{folder.name}.txt")
    corpus.write_text(TEXT * 3, encoding="utf-8")
    create_component("tokenizers", type, settings, where="tokenizer").train(Corpus([corpus]), folder)
    return folder


def make_model(name: str, head: Head, tokenizer: Path, type: str, **further: Any) -> PreTrainedModel:
    """A tiny model for `tokenizer`, a folder of the kind `type`, with weights far enough from 0 to matter."""
    small: Mapping[str, Any] = {**further, "max_position_embeddings": 96}
    component = registry().component("architectures", name)
    known = {key: value for key, value in small.items() if key in component.model_fields}
    architecture: Any = toy.settings(component, **known)
    vocabulary = create_component("tokenizers", type, {}, where="tokenizer").encoder(tokenizer).vocabulary
    torch.manual_seed(3)
    model: PreTrainedModel = architecture.build(vocabulary, head)
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.1)
    return model.eval()
