"""Padded batches in Transformers' own models, as `terakoya finetune` and `evaluate` give them to a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from settings import Case, Measurement, Settings
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from terakoya.config.parameters import Parameters
from terakoya.inference.padded_attention import use_safe_attention
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import disentangled
from terakoya.training.model.build import build_module

PRESETS = ("bert_base", "modernbert_base", "bert_ja", "deberta_base")
"""Attention to all, to windows of 128 and of 16 tokens, and disentangled."""
ROWS = 16


def padded(settings: Settings) -> Iterator[Measurement]:
    """Yields the loss of a classifier of two layers on a padded batch, and its gradient, beside float32 on the CPU."""
    use_safe_attention()
    for preset in PRESETS:
        model = classifier(preset, settings)
        batch = padded_batch(model.config.max_position_embeddings, model.config.vocab_size)
        loss, gradient = solve(model, batch, torch.device("cpu"), "fp32")
        for precision in ("fp32", "bf16"):
            seen, own = solve(model, batch, settings.device, precision)
            yield {
                "preset": preset, "precision": precision, "finite": bool(own.isfinite().all()),
                "loss_error": abs(seen / loss - 1),
                "gradient_error": float((own - gradient).norm() / gradient.norm()),
            }  # fmt: skip


def classifier(preset: str, settings: Settings) -> PreTrainedModel:
    """Returns a classifier with random weights, two layers of the preset's sizes, without dropout."""
    raw = Case(preset, ROWS, 1, architecture={"num_hidden_layers": 2}).parameters(settings)
    parameters = Parameters.from_dict({**raw, "precision": "fp32"}, source=preset)
    vocabulary = TokenStore.open(Path(raw["data"]["train"][0])).facts.vocabulary
    config = build_module(parameters, vocabulary).model.config  # type: ignore[union-attr]
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False).eval()
    disentangled.fit_autocast(model)
    return model


def padded_batch(longest: int, vocabulary_size: int) -> dict[str, Tensor]:
    """Returns rows of random ids, the first as long as `longest` tokens, the others from a sixteenth of it on."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest, longest // 16, ROWS).long()
    shown = torch.arange(longest) < lengths[:, None]
    ids = torch.randint(5, vocabulary_size, shown.shape, generator=generator) * shown
    return {"input_ids": ids, "attention_mask": shown.long(), "labels": torch.arange(ROWS) % 2}


def solve(
    model: PreTrainedModel, batch: dict[str, Tensor], device: torch.device, precision: str
) -> tuple[float, Tensor]:
    """Returns the loss and the gradient of all weights, float64 on the CPU."""
    model.to(device).zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = model(**{name: each.to(device) for name, each in batch.items()}).loss
    loss.backward()
    gradient = [each.grad.flatten().double().cpu() for each in model.parameters() if each.grad is not None]
    return float(loss.detach()), torch.cat(gradient)
