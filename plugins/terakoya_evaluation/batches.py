"""Groups sequences of different lengths into padded batches of a bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from terakoya.training.batches import copy_to_device

READ_AHEAD = 32
"""Number of batches whose sequences are sorted by length together."""


@dataclass(frozen=True)
class ScoredSequence:
    """An input sequence, and the tokens in it that are scored.

    Attributes:
        ids: the input, (n,).
        positions: positions whose logits are scored, (k,).
        labels: the correct token at each of these positions, (k,).
    """

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def batch_by_length(items: Iterable[ScoredSequence], *, tokens: int) -> Iterator[list[ScoredSequence]]:
    """Yields `items` in batches of similar lengths, each of one item or of at most `tokens` positions with padding."""
    buffer: list[ScoredSequence] = []
    size = 0
    for item in items:
        buffer.append(item)
        size += len(item.ids)
        if size >= READ_AHEAD * tokens:
            yield from _sorted_batches(buffer, tokens)
            buffer, size = [], 0
    yield from _sorted_batches(buffer, tokens)


def _sorted_batches(items: Sequence[ScoredSequence], tokens: int) -> Iterator[list[ScoredSequence]]:
    batch: list[ScoredSequence] = []
    for item in sorted(items, key=lambda item: -len(item.ids)):
        if batch and len(batch[0].ids) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def negative_log_likelihood(
    model: torch.nn.Module, batch: Sequence[ScoredSequence], *, pad: int, device: torch.device, **arguments: object
) -> Tensor:
    """Returns the sum of -log p(label) over all scored positions, in nats: () float64, for which the host does not
    wait.

    Args:
        model: a model whose output has `logits` (B, T, V), or `prediction_logits`, as that of BertForPreTraining.
        pad: the id that pads sequences at their end; padding is masked out.
        arguments: further arguments of the model.
    """
    length = max(len(item.ids) for item in batch)
    ids = np.full((len(batch), length), pad, np.int64)
    mask = np.zeros((len(batch), length), np.int64)
    for row, item in enumerate(batch):
        ids[row, : len(item.ids)] = item.ids
        mask[row, : len(item.ids)] = 1
    rows = np.repeat(np.arange(len(batch)), [len(item.positions) for item in batch])
    positions = np.concatenate([item.positions for item in batch])
    labels = np.concatenate([item.labels for item in batch])

    def to_tensor(array: np.ndarray) -> Tensor:
        return copy_to_device(torch.from_numpy(array.astype(np.int64)), device)

    with torch.no_grad():
        output = model(input_ids=to_tensor(ids), attention_mask=to_tensor(mask), **arguments)
        logits = output.logits if hasattr(output, "logits") else output.prediction_logits
        scored = logits[to_tensor(rows), to_tensor(positions)].float()
        return torch.nn.functional.cross_entropy(scored, to_tensor(labels), reduction="none").double().sum()
