"""The root module of replaced-token detection: a generator, run where tokens are masked, and a discriminator.

Letters in shapes: B rows, T positions, K slots of masked positions, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.errors import UserError
from terakoya.toolkit.objectives.cross_entropy import IGNORED, summed_cross_entropy_and_odds_
from terakoya.toolkit.objectives.sampling import draw

BINS = 512
"""Bins of the discriminator's scores."""
STEEP, LARGEST = 40.0, 16.0
"""Bins are equally wide in asinh(STEEP x score) + asinh(STEEP x (score - centre)) for scores from -LARGEST to LARGEST:
0.0014 at 0 and at the centre, some 3 % of the distance from both elsewhere. At 0 lie the scores of a new discriminator,
at the centre those of one that has learnt no more than how many tokens are replaced: either differ by little."""


class ReplacedTokenModule(nn.Module):
    """Its forward returns sums in float32, not means."""

    def __init__(
        self,
        generator_architecture: Architecture,
        generator: PreTrainedModel,
        architecture: Architecture,
        discriminator: PreTrainedModel,
        *,
        temperature: float,
        centre: float,
    ) -> None:
        super().__init__()
        self.generator_architecture = generator_architecture
        self.generator = generator
        self.architecture = architecture
        self.discriminator = discriminator
        self.temperature = temperature
        self.centre = centre

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the micro-batch: both losses, how often the generator and its samples were right, and a histogram
        (2 x BINS,) of scores, of original tokens first."""
        labels = batch["masked_labels"]
        hidden = self.generator_architecture.hidden(self.generator, batch)
        picked = hidden.flatten(0, 1).index_select(0, batch["masked_positions"])
        logits = self.generator_architecture.logits(self.generator, picked)
        generator_loss, odds = summed_cross_entropy_and_odds_(logits, labels)
        sampled = self.sample(odds, batch)
        right = odds.gather(1, labels.clamp(min=0)[:, None])[:, 0] == 1.0  # the likeliest, whose odds are 1
        corrupted, replaced = corrupt(batch["input_ids"], batch["masked_positions"], labels, sampled)
        real = batch["document_ids"] >= 0
        hidden = self.architecture.hidden(self.discriminator, {**batch, "input_ids": corrupted})
        scores = self.architecture.replaced_logits(self.discriminator, hidden).float()
        discriminator_loss = F.binary_cross_entropy_with_logits(
            scores, replaced.float(), weight=real.float(), reduction="sum"
        )
        return {
            "generator_loss": generator_loss,
            "generator_accuracy": (right & (labels != IGNORED)).sum(dtype=torch.float32),
            "sampled_accuracy": (sampled == labels).sum(dtype=torch.float32),
            "discriminator_loss": discriminator_loss,
            "discriminator_scores": histogram(scores.detach(), replaced, real, centre=self.centre),
        }

    def sample(self, odds: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """A token (K,) for each slot, drawn from the generator's distribution, `odds` (K, V) being proportional to it
        at temperature 1."""
        weights = odds if self.temperature == 1.0 else odds.pow(1.0 / self.temperature)
        return draw(weights, batch["sample_uniforms"])


def corrupt(input_ids: Tensor, positions: Tensor, labels: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """The discriminator's input (B, T), and where it holds another token than the original, (B, T) bool.

    Args:
        input_ids: (B, T), masked.
        positions: (K,) into the flattened rows.
        labels: (K,), the original tokens there; -100 in unused slots.
        sampled: (K,), the tokens to put there.
    """
    count = input_ids.numel()
    used = labels != IGNORED
    place = torch.where(used, positions, count)  # one more place, for what unused slots write
    ids = F.pad(input_ids.flatten(), (0, 1)).scatter(0, place, sampled)
    replaced = torch.zeros_like(ids, dtype=torch.bool).scatter(0, place, sampled != labels)
    return ids[:count].view_as(input_ids), replaced[:count].view_as(input_ids)


def histogram(scores: Tensor, replaced: Tensor, real: Tensor, *, centre: float) -> Tensor:
    """How many `real` scores fall into each bin, (2 x BINS,) float32: of original tokens, then of replaced ones."""
    scale, zero = _scale(centre)
    scores = scores.nan_to_num()
    places = torch.asinh(scores * STEEP) + torch.asinh((scores - centre) * STEEP) - math.asinh(-centre * STEEP)
    bins = ((places * scale).floor() + zero).clamp(0, BINS - 1)
    bins = torch.where(scores < 0, bins.clamp(max=zero - 1), bins.clamp(min=zero)).long() + BINS * replaced
    counts = torch.zeros(2 * BINS, dtype=torch.float32, device=scores.device)
    return counts.scatter_add_(0, bins.flatten(), real.flatten().float())


def _scale(centre: float) -> tuple[float, int]:
    """Bins for each unit of that sum, and the number of the first bin that starts at 0."""
    low, middle, high = (
        math.asinh(score * STEEP) + math.asinh((score - centre) * STEEP) for score in (-LARGEST, 0.0, LARGEST)
    )
    scale = BINS / (high - low)
    return scale, round((middle - low) * scale)


def measures(counts: np.ndarray, *, centre: float) -> dict[str, float]:
    """What a `histogram` (2 x BINS,) says of a discriminator that calls tokens of score 0 and above replaced: accuracy,
    precision, recall, area under the ROC curve (scores of one bin counted as equal), and how many were replaced. What
    would be a share of nothing is left out."""
    original, replaced = counts[:BINS], counts[BINS:]
    _, zero = _scale(centre)
    found, alarms = replaced[zero:].sum(), original[zero:].sum()
    originals, replacements = original.sum(), replaced.sum()
    below = original.cumsum() - original / 2  # originals of a lower score, half of those of an equal one
    shares = {
        "discriminator_accuracy": (found + originals - alarms, originals + replacements),
        "discriminator_precision": (found, found + alarms),
        "discriminator_recall": (found, replacements),
        "discriminator_auc": (float(below @ replaced), originals * replacements),
        "replaced_rate": (replacements, originals + replacements),
    }
    return {name: float(part / whole) for name, (part, whole) in shares.items() if whole > 0}


# ------------------------------------------------------------------------------------------- embeddings in common


class DisentangledEmbedding(nn.Module):
    """The generator's word embeddings, out of the discriminator's reach, plus a difference (V, E).

    He et al., 2021 (DeBERTaV3, arXiv:2111.09543): gradient-disentangled embedding sharing.
    """

    def __init__(self, shared: nn.Embedding, difference: Tensor) -> None:
        super().__init__()
        self.shared = shared
        self.difference = nn.Embedding.from_pretrained(difference, freeze=False, padding_idx=shared.padding_idx)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings (..., E) of `input_ids` (...)."""
        with torch.no_grad():
            shared = self.shared(input_ids)
        return shared + self.difference(input_ids)


def disentangle(generator: PreTrainedModel, discriminator: PreTrainedModel, *, learnt: bool = False) -> None:
    """Puts the generator's word embeddings plus a difference in place of the discriminator's own: plus zero, or, where
    both have `learnt` already, plus what they differ by.

    Raises:
        UserError: the two are not equally wide.
    """
    widths = [model.get_input_embeddings().embedding_dim for model in (generator, discriminator)]
    if widths[0] != widths[1]:
        raise UserError(
            f"word embeddings cannot be shared: {widths[0]} numbers a word in {type(generator).__name__}, "
            f"{widths[1]} in {type(discriminator).__name__}"
        )
    shared, own = (model.get_input_embeddings() for model in (generator, discriminator))
    difference = own.weight - shared.weight if learnt else torch.zeros_like(shared.weight)
    discriminator.set_input_embeddings(DisentangledEmbedding(shared, difference.detach()))


def joined(discriminator: PreTrainedModel) -> PreTrainedModel:
    """`discriminator` with plain word embeddings: itself, or a copy that holds the sum."""
    embedding = discriminator.get_input_embeddings()
    if not isinstance(embedding, DisentangledEmbedding):
        return discriminator
    total = (embedding.shared.weight + embedding.difference.weight).detach()
    plain = nn.Embedding.from_pretrained(total, freeze=False, padding_idx=embedding.shared.padding_idx)
    return copy.deepcopy(discriminator, {id(embedding): plain})
