"""ELECTRA for `time_to_loss.py`: the peer's two models, discriminators kept along a training, and what they score."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from electra import DISCRIMINATOR_WEIGHT, GENERATOR_WEIGHT, Plain
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_input"))

import jsts


class Peer(Plain):
    """Generator and discriminator with the arguments and the result of Transformers' models, for `Trainer`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Returns `loss`, the weighted sum, and `discriminator_loss`, both means; shapes as in `Plain.forward`."""
        generator_loss, discriminator_loss = super().forward(input_ids, attention_mask, labels)
        loss = GENERATOR_WEIGHT * generator_loss + DISCRIMINATOR_WEIGHT * discriminator_loss
        return {"loss": loss, "discriminator_loss": discriminator_loss.detach()}


def peer_model(vocabulary_size: int, settings: Mapping[str, Any]) -> Peer:
    """Returns both models with random weights, tied embeddings and Transformers' defaults, dropout 0.1 among them.

    The generator has half the width, as narrow as that of ELECTRA-small where the discriminator is 128 wide.
    """
    width, length = settings["hidden_size"], settings["sequence_length"]
    configs = [
        ElectraConfig(
            vocab_size=vocabulary_size, embedding_size=width, hidden_size=size, num_hidden_layers=settings["layers"],
            num_attention_heads=max(1, size // 32), intermediate_size=4 * size, max_position_embeddings=length,
        )
        for size in (width // 2, width)
    ]  # fmt: skip
    return Peer(ElectraForMaskedLM(configs[0]), ElectraForPreTraining(configs[1]), "gumbel")


@torch.no_grad()
def measure(model: Peer, batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Returns the discriminator's mean loss over all tokens, some of which its own generator replaced. Dropout is off,
    and what the generator draws changes nothing that the training draws."""
    model.eval()
    loss = count = 0.0
    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            tokens = float(batch["attention_mask"].sum())
            loss += float(model(**batch)["discriminator_loss"]) * tokens
            count += tokens
    model.train()
    return loss / count


@dataclass(frozen=True)
class Tuning:
    """How each discriminator is fine-tuned: with the first `pairs` training pairs, as `jsts.py` does."""

    learning_rate: float
    epochs: float
    pairs: int


def score(folder: Path, tokenizer_folder: Path, data: Path, tuning: Tuning, seed: int) -> float:
    """Fine-tunes the discriminator in `folder` on JSTS with a new head. Returns Pearson's correlation with people's
    judgement on the validation pairs."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True, trust_remote_code=False)
    sets = {name: jsts.read(data / f"{name}-v1.3.json.gz", tokenizer) for name in ("train", "valid")}
    sets["train"] = sets["train"][: tuning.pairs]
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder, num_labels=1, problem_type="regression", trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, config=config, trust_remote_code=False,
        ignore_mismatched_sizes=True,  # ModernBERT's discriminator is a classifier of two labels
    )  # fmt: skip
    return float(jsts.tune(model, sets, tokenizer, tuning, seed)["valid"][0])
