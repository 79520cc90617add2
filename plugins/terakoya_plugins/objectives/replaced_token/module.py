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
from terakoya.toolkit.objectives.columns import values_at
from terakoya.toolkit.objectives.cross_entropy import IGNORED, summed_cross_entropy_and_odds_
from terakoya.toolkit.objectives.padded_head import padded_head, vocabulary_part
from terakoya.toolkit.objectives.sampling import draw

BINS = 512
"""Number of bins of the discriminator's scores."""
STEEP, LARGEST = 40.0, 16.0
"""Bins are equally wide in asinh(STEEP x score) + asinh(STEEP x (score - centre)) for scores from -LARGEST to LARGEST:
0.0014 at 0 and at the centre, some 3 % of the distance from both elsewhere. The scores of a new discriminator are close
to 0, those of one that has learnt only the share of replaced tokens are close to the centre: both need narrow bins."""


class ReplacedTokenModule(nn.Module):
    """A generator and a discriminator; the forward returns sums in float32, not means."""

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
        """Sums over the micro-batch: both losses, the number of correct predictions and of correct samples of the
        generator, and a histogram (2 x BINS,) of scores, first of original tokens."""
        labels = batch["masked_labels"]
        hidden = self.generator_architecture.hidden(self.generator, batch)
        picked = hidden.flatten(0, 1).index_select(0, batch["masked_positions"])
        with padded_head(self.generator) as columns:
            logits = self.generator_architecture.logits(self.generator, picked)
        generator_loss, odds = summed_cross_entropy_and_odds_(logits, labels, columns)
        sampled = self.sample(odds, batch)
        correct = values_at(odds, labels.clamp(min=0), columns) == 1.0  # the most likely token has odds 1
        corrupted, replaced = corrupt(batch["input_ids"], batch["masked_positions"], labels, sampled)
        real = batch["document_ids"] >= 0
        hidden = self.architecture.hidden(self.discriminator, {**batch, "input_ids": corrupted})
        scores = self.architecture.replaced_logits(self.discriminator, hidden).float()
        discriminator_loss = F.binary_cross_entropy_with_logits(
            scores, replaced.float(), weight=real.float(), reduction="sum"
        )
        return {
            "generator_loss": generator_loss,
            "generator_accuracy": (correct & (labels != IGNORED)).sum(dtype=torch.float32),
            "sampled_accuracy": (sampled == labels).sum(dtype=torch.float32),
            "discriminator_loss": discriminator_loss,
            "discriminator_scores": score_histogram(scores.detach(), replaced, real, centre=self.centre),
        }

    def sample(self, odds: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Samples a token (K,) for each slot from the generator's distribution; `odds` (K, V) are proportional to its
        probabilities at temperature 1, those of this process's part where processes divide the vocabulary."""
        weights = odds if self.temperature == 1.0 else odds.pow(1.0 / self.temperature)
        return draw(weights, batch["sample_uniforms"], vocabulary_part(self.generator))


def corrupt(input_ids: Tensor, positions: Tensor, labels: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """The discriminator's input (B, T), and where it has another token than the original, (B, T) bool.

    Args:
        input_ids: (B, T), masked.
        positions: (K,) into the flattened rows.
        labels: (K,), the original tokens at these positions; -100 in unused slots.
        sampled: (K,), the new tokens at these positions.
    """
    count = input_ids.numel()
    used = labels != IGNORED
    target = torch.where(used, positions, count)  # unused slots write to one extra position
    ids = F.pad(input_ids.flatten(), (0, 1)).scatter(0, target, sampled)
    replaced = torch.zeros_like(ids, dtype=torch.bool).scatter(0, target, sampled != labels)
    return ids[:count].view_as(input_ids), replaced[:count].view_as(input_ids)


def score_histogram(scores: Tensor, replaced: Tensor, real: Tensor, *, centre: float) -> Tensor:
    """The number of `real` scores in each bin, (2 x BINS,) float32: of original tokens, then of replaced ones."""
    scale, zero = _bin_scale(centre)
    scores = scores.nan_to_num()
    stretched = torch.asinh(scores * STEEP) + torch.asinh((scores - centre) * STEEP) - math.asinh(-centre * STEEP)
    bins = ((stretched * scale).floor() + zero).clamp(0, BINS - 1)
    bins = torch.where(scores < 0, bins.clamp(max=zero - 1), bins.clamp(min=zero)).long() + BINS * replaced
    counts = torch.zeros(2 * BINS, dtype=torch.float32, device=scores.device)
    return counts.scatter_add_(0, bins.flatten(), real.flatten().float())


def _bin_scale(centre: float) -> tuple[float, int]:
    """Bins per unit of the stretched score (see STEEP), and the number of the first bin for scores >= 0."""
    low, middle, high = (
        math.asinh(score * STEEP) + math.asinh((score - centre) * STEEP) for score in (-LARGEST, 0.0, LARGEST)
    )
    scale = BINS / (high - low)
    return scale, round((middle - low) * scale)


def discriminator_metrics(counts: np.ndarray, *, centre: float) -> dict[str, float]:
    """Metrics from a `score_histogram` (2 x BINS,), where tokens of score >= 0 are predicted to be replaced: accuracy,
    precision, recall, area under the ROC curve (scores of one bin count as equal), and the share of replaced tokens.
    Metrics with a denominator of 0 are left out."""
    original, replaced = counts[:BINS], counts[BINS:]
    _, zero = _bin_scale(centre)
    true_positives, false_positives = replaced[zero:].sum(), original[zero:].sum()
    originals, replacements = original.sum(), replaced.sum()
    below = original.cumsum() - original / 2  # originals with a lower score, plus half of those with an equal one
    shares = {
        "discriminator_accuracy": (true_positives + originals - false_positives, originals + replacements),
        "discriminator_precision": (true_positives, true_positives + false_positives),
        "discriminator_recall": (true_positives, replacements),
        "discriminator_auc": (float(below @ replaced), originals * replacements),
        "replaced_rate": (replacements, originals + replacements),
    }
    return {name: float(part / whole) for name, (part, whole) in shares.items() if whole > 0}


# ------------------------------------------------------------------------------------------- shared embeddings


class DisentangledEmbedding(nn.Module):
    """The generator's word embeddings, without gradient from the discriminator, plus a difference (V, E).

    He et al., 2021 (DeBERTaV3, arXiv:2111.09543): gradient-disentangled embedding sharing.
    """

    def __init__(self, shared: nn.Embedding, difference: Tensor) -> None:
        super().__init__()
        self.shared = shared
        self.difference = nn.Embedding.from_pretrained(difference, freeze=False, padding_idx=shared.padding_idx)

    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            shared = self.shared(input_ids)
        return shared + self.difference(input_ids)


def disentangle(generator: PreTrainedModel, discriminator: PreTrainedModel, *, learnt: bool = False) -> None:
    """Replaces the discriminator's word embeddings by the generator's plus a difference: zero or, for `learnt` models,
    the difference of their word embeddings.

    Raises:
        UserError: the two embeddings differ in width.
    """
    widths = [model.get_input_embeddings().embedding_dim for model in (generator, discriminator)]
    if widths[0] != widths[1]:
        raise UserError(
            f"word embeddings cannot be shared: their width is {widths[0]} in {type(generator).__name__}, "
            f"{widths[1]} in {type(discriminator).__name__}"
        )
    shared, own = (model.get_input_embeddings() for model in (generator, discriminator))
    difference = own.weight - shared.weight if learnt else torch.zeros_like(shared.weight)
    discriminator.set_input_embeddings(DisentangledEmbedding(shared, difference.detach()))


def with_plain_embeddings(discriminator: PreTrainedModel) -> PreTrainedModel:
    """`discriminator`; if it has a `DisentangledEmbedding`, a copy of it with the sum as plain word embeddings."""
    embedding = discriminator.get_input_embeddings()
    if not isinstance(embedding, DisentangledEmbedding):
        return discriminator
    total = (embedding.shared.weight + embedding.difference.weight).detach()
    plain = nn.Embedding.from_pretrained(total, freeze=False, padding_idx=embedding.shared.padding_idx)
    return copy.deepcopy(discriminator, {id(embedding): plain})
