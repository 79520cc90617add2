"""Megatron-LM's order of documents and samples, from the same seed.

Its published rule (megatron/core/datasets/gpt_dataset.py): the documents of all epochs that the run needs are shuffled
together, by numpy's RandomState; joined, they are cut into samples that overlap by one token; the samples are shuffled
with the same generator. If less than 80 % of the last epoch is used, it is shuffled separately, after the others.

Letters: D documents, J documents of all epochs, R samples, n any number of them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from terakoya.errors import UserError

_SEPARATE_BELOW = 0.80
"""Megatron-LM's constant: below this share of use the last epoch is shuffled separately."""


class MegatronOrder:
    """The joined documents of a store and the order of their samples. Needs some 12 bytes for each of J documents and
    4 for each sample."""

    def __init__(self, lengths: np.ndarray, *, sequence_length: int, samples: int | None, seed: int) -> None:
        """`lengths` (D,) are the tokens of documents, end tokens included. `samples` is the number that a run takes in
        all; None gives the order of a run of one epoch."""
        if seed >= 1 << 32:
            raise UserError(
                f"seed: layout megatron needs a seed below {1 << 32:,}, as numpy's RandomState does; got {seed}"
            )
        self._lengths, self._sequence_length, self._samples, self._seed = lengths, sequence_length, samples, seed
        per_epoch = int(lengths.sum())
        epochs = 1 if samples is None else max(1, -(-(samples * sequence_length + 1) // per_epoch))
        random = np.random.RandomState(seed)
        before = ((epochs - 1) * per_epoch - 1) // sequence_length  # samples without the last epoch
        in_one_epoch = (per_epoch - 1) // sequence_length
        separate = samples is not None and epochs > 1 and samples - before < int(_SEPARATE_BELOW * in_one_epoch)
        self._documents = np.concatenate(
            [_shuffle(np.tile(np.arange(len(lengths), dtype=np.int32), times), random)
             for times in ([epochs - 1, 1] if separate else [epochs])]
        )  # fmt: skip
        self._starts = np.concatenate([[0], np.cumsum(lengths[self._documents], dtype=np.int64)])
        count = (epochs * per_epoch - 1) // sequence_length
        kind = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
        cuts = [0, before, count] if separate else [0, count]
        self._order = np.concatenate([_shuffle(np.arange(*span, dtype=kind), random) for span in pairwise(cuts)])
        self._later_epoch = lru_cache(maxsize=1)(self._build_later_epoch)

    def __len__(self) -> int:
        """Number of samples (R) of all epochs; last tokens that fill no sample are left out, as in Megatron-LM."""
        return len(self._order)

    def of_epoch(self, epoch: int) -> MegatronOrder:
        """This order for epoch 0; for a run that continues beyond it, the order from the seed plus `epoch`."""
        return self if epoch == 0 else self._later_epoch(epoch)

    def _build_later_epoch(self, epoch: int) -> MegatronOrder:
        return MegatronOrder(
            self._lengths, sequence_length=self._sequence_length, samples=self._samples, seed=self._seed + epoch
        )

    def samples(self, positions: np.ndarray) -> np.ndarray:
        """The samples (n,) int64 at `positions` (n,) of the order, numbered along the joined documents."""
        return self._order[positions].astype(np.int64)

    @property
    def stream_length(self) -> int:
        """Number of tokens of all joined documents."""
        return int(self._starts[-1])

    def stream_start(self, number: np.ndarray) -> np.ndarray:
        """Where each of the joined documents `number` (n,) starts; for J, the end of the last one."""
        return self._starts[number]

    def document_at(self, place: np.ndarray) -> np.ndarray:
        """The number of the joined document at each `place` (n,)."""
        return np.searchsorted(self._starts, place, side="right") - 1

    def in_store(self, number: np.ndarray) -> np.ndarray:
        """The number in the store of each of the joined documents `number` (n,), int64."""
        return self._documents[number].astype(np.int64)


def _shuffle(values: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(values)
    return values
