"""Sequences of different lengths as padded batches of a bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

READ_AHEAD = 32
"""Batches' worth of sequences that are sorted by length together."""


@dataclass(frozen=True)
class Scored:
    """A sequence that a model is to see, and which tokens of it are scored.

    Attributes:
        ids: what the model sees, (n,).
        places: positions whose logits are looked at, (k,).
        labels: the token that each of them should have named, (k,).
    """

    ids: np.ndarray
    places: np.ndarray
    labels: np.ndarray


def batched(items: Iterable[Scored], *, tokens: int) -> Iterator[list[Scored]]:
    """`items` in batches whose padded size is at most `tokens`, or one item; similar lengths come together."""
    waiting: list[Scored] = []
    size = 0
    for item in items:
        waiting.append(item)
        size += len(item.ids)
        if size >= READ_AHEAD * tokens:
            yield from _cut(waiting, tokens)
            waiting, size = [], 0
    yield from _cut(waiting, tokens)


def _cut(items: Sequence[Scored], tokens: int) -> Iterator[list[Scored]]:
    batch: list[Scored] = []
    for item in sorted(items, key=lambda each: -len(each.ids)):
        if batch and len(batch[0].ids) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def negative_log_likelihood(
    model: torch.nn.Module, batch: Sequence[Scored], *, pad: int, device: torch.device, **arguments: object
) -> float:
    """The sum over all scored places of -log p(label), natural logarithms, of a model that returns `logits` (B, T, V).

    Padding stands behind and is masked out. `arguments` go to the model too.
    """
    longest = max(len(item.ids) for item in batch)
    ids = np.full((len(batch), longest), pad, np.int64)
    mask = np.zeros((len(batch), longest), np.int64)
    for row, item in enumerate(batch):
        ids[row, : len(item.ids)] = item.ids
        mask[row, : len(item.ids)] = 1
    rows = np.repeat(np.arange(len(batch)), [len(item.places) for item in batch])
    places = np.concatenate([item.places for item in batch])
    labels = np.concatenate([item.labels for item in batch])

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    with torch.no_grad():
        logits = model(input_ids=put(ids), attention_mask=put(mask), **arguments).logits
        picked = logits[put(rows), put(places)].float()
        return float(torch.nn.functional.cross_entropy(picked, put(labels), reduction="none").double().sum())
