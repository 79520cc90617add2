"""The root module of RetroMAE: a masked language model, and a decoder of one layer that sees its [CLS].

Letters in shapes: B rows, T positions, H hidden size, N heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.errors import UserError
from terakoya.toolkit.objectives.columns import most_likely
from terakoya.toolkit.objectives.cross_entropy import summed_cross_entropy_
from terakoya.toolkit.objectives.padded_head import padded_head

LOWER = 0xFFFFFFFF
"""The lower 32 bits."""


class RetroMAEModule(nn.Module):
    """Wraps `model` and a decoder; the forward returns sums in float32, not means."""

    def __init__(self, architecture: Architecture, model: PreTrainedModel, *, hidden_share: float) -> None:
        super().__init__()
        self.architecture = architecture
        self.model = model
        self.hidden_share = hidden_share
        config = model.config
        width = model.get_input_embeddings().embedding_dim
        if width != config.hidden_size:
            raise UserError(
                f"objective retromae: the decoder reads word embeddings beside hidden states, which differ in width in "
                f"architecture {type(architecture).__name__}: {width} and {config.hidden_size}; give both one size"
            )
        self.decoder = EnhancedDecoder(
            config.hidden_size,
            heads=config.num_attention_heads,
            positions=architecture.max_sequence_length() or config.max_position_embeddings,
            initializer_range=config.initializer_range,
        )

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the micro-batch: both losses, and in evaluation both numbers of correct predictions."""
        hidden = self.architecture.hidden(self.model, batch)
        picked = hidden.flatten(0, 1).index_select(0, batch["masked_positions"])
        sums = self._score("mlm_loss", "masked_accuracy", picked, batch["masked_labels"])
        documents, positions = batch["document_ids"], batch["position_ids"]
        length, bound = documents.shape[1], self.decoder.positions.num_embeddings
        if length > bound:  # relative positions have no bound
            raise UserError(
                f"objective retromae: the decoder learns {bound} positions, the architecture's "
                f"max_position_embeddings, and rows have {length}; set architecture.max_position_embeddings to {length}"
            )
        columns = torch.arange(documents.shape[1], device=documents.device)
        first = (columns - positions)[..., None].expand_as(hidden)
        words = self.model.get_input_embeddings()(batch["original_ids"])
        visible = visible_positions(documents, positions, batch["decoder_keys"], hidden_share=self.hidden_share)
        decoded = self.decoder(hidden.gather(1, first), words, positions, visible)
        return sums | self._score("decoder_loss", "decoder_accuracy", decoded.flatten(0, 1), batch["decoder_labels"])

    def _score(self, loss: str, accuracy: str, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The summed cross entropy of the vocabulary head at `hidden` (n, H) for as many `labels`, -100 ignored; in
        evaluation also the number of correct predictions."""
        labels = labels.flatten()
        with padded_head(self.model) as columns:
            logits = self.architecture.logits(self.model, hidden)
        sums = {}
        if not self.training:
            sums[accuracy] = (most_likely(logits, columns) == labels).sum(dtype=torch.float32)
        return sums | {loss: summed_cross_entropy_(logits, labels, columns)}


class EnhancedDecoder(nn.Module):
    """One layer with attention from the embedding of a document, at each position, to its tokens.

    Positions are learnt here, from 0 in each document: encoders with rotary positions have no embeddings of them.
    """

    def __init__(self, width: int, *, heads: int, positions: int, initializer_range: float) -> None:
        super().__init__()
        self.heads = heads
        self.positions = nn.Embedding(positions, width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.input_norm, self.attention_norm, self.output_norm = (nn.LayerNorm(width) for _ in range(3))
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=initializer_range)
            if isinstance(part, nn.Linear):
                nn.init.zeros_(part.bias)

    def forward(self, document: Tensor, words: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Returns the hidden states (B, T, H) from which each token is predicted.

        Args:
            document: (B, T, H), at each position the embedding of its document.
            words: (B, T, H), the embeddings of the original tokens.
            positions: (B, T), from 0 in each document.
            visible: (B, 1, T, T) bool, which position may attend to which.
        """
        places = self.positions(positions)
        query = document + places
        seen = torch.where((positions == 0)[..., None], document, self.input_norm(words + places))
        q, k, v = (
            projection(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection, states in ((self.q_proj, query), (self.k_proj, seen), (self.v_proj, seen))
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)
        middle = self.attention_norm(query + self.o_proj(attended))
        return self.output_norm(middle + self.down_proj(F.gelu(self.up_proj(middle))))


def visible_positions(documents: Tensor, positions: Tensor, keys: Tensor, *, hidden_share: float) -> Tensor:
    """Returns which positions (B, 1, T, T) bool the decoder sees from each position: the first of its document, and of
    the others, but for itself, all but about `hidden_share`. Padding sees padding.

    Args:
        documents: (B, T), -1 for padding.
        positions: (B, T), from 0 in each document.
        keys: (B,) int64 below 2**32, from which the choice follows.
    """
    length = documents.shape[1]
    pairs = torch.arange(length * length, device=documents.device).view(1, length, length)
    drawn = mix((keys[:, None, None] + pairs * 0x9E3779B1) & LOWER)
    others = torch.ones(length, length, dtype=torch.bool, device=documents.device).fill_diagonal_(False)
    sampled = (drawn >= int(hidden_share * 2**32)) & others
    same = documents[:, :, None] == documents[:, None, :]
    return (same & (sampled | (positions == 0)[:, None, :]))[:, None]


def mix(state: Tensor) -> Tensor:
    """Returns `state`, int64 below 2**32, with its bits mixed: the finaliser of MurmurHash3 (Appleby, 2011)."""
    state = (state ^ (state >> 16)) * 0x85EBCA6B & LOWER
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & LOWER
    return state ^ (state >> 16)
