"""Folders as language-pretraining's run_pretraining.py saves them, and the models in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

PAIR = "ElectraForPretrainingModel"
SIZES = {
    "vocab_size": 200, "pad_token_id": 0, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
NARROW = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
Weights = dict[str, Tensor]


def build(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    made: type[PreTrainedModel] = getattr(transformers, kind)
    model = made(made.config_class(**{**SIZES, **settings}))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.tie_weights()
    return model.eval()


def save(folder: Path, config: dict[str, Any], name: str, weights: Weights) -> Path:
    """Writes a folder as Transformers 4.22 wrote it: positions are among the weights, shared ones are there twice."""
    folder.mkdir(parents=True)
    positions = {
        each.replace("word_embeddings.weight", "position_ids"): torch.arange(32)[None]
        for each in weights
        if each.endswith("embeddings.word_embeddings.weight")
    }
    torch.save({**weights, **positions}, folder / "pytorch_model.bin")
    torch.save(transformers.TrainingArguments(output_dir="x"), folder / "training_args.bin")
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    return folder


def make_pair(**settings: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Generator and discriminator with the same embeddings."""
    generator = build("ElectraForMaskedLM", embedding_size=12, **NARROW, **settings)
    discriminator = build("ElectraForPreTraining", embedding_size=12, **settings)
    discriminator.electra.embeddings = generator.electra.embeddings
    return generator, discriminator


def save_pair(folder: Path, *, vocab_size: int = 200, **changes: Tensor | None) -> Path:
    """`changes` replace a weight, whose name has __ for a point, or remove it."""
    generator, discriminator = make_pair(vocab_size=vocab_size)
    weights = {f"generator.{name}": value for name, value in generator.state_dict().items()}
    weights |= {f"discriminator.{name}": value for name, value in discriminator.state_dict().items()}
    for name, value in changes.items():
        weights.pop(name.replace("__", "."))
        weights |= {} if value is None else {name.replace("__", "."): value}
    return save(folder, discriminator.config.to_dict(), PAIR, weights)
