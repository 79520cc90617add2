"""Sequence and context parallelism: the processes of a replica divide the positions of its rows.

Every process of a replica has the same slice of each of the replica's rows, so it keeps only its part of the
activations. Everything but attention works on one position at a time, so a process needs no other one for it. In
attention there are two ways:

- `sp_size` (DeepSpeed-Ulysses; Jacobs et al., 2023, arXiv:2309.14509): each process sends all heads but its own part of
  them, receives its part of the heads for all other positions, attends over whole rows, and exchanges heads for
  positions again: two all-to-alls in each layer's forward and two in its backward. The number of heads must be
  divisible by the number of processes.
- `cp_size` (context parallelism; Llama 3, 2024, arXiv:2407.21783, section 3.3.2): each process gathers the keys and
  values of whole rows, and attends for the queries of its own positions: an all-gather in each layer's forward, a
  reduce-scatter of their gradients in its backward. Any number of heads will do.

Losses are sums over positions, so each process has the sums of its own positions, and the gradient of each weight is
the sum over all processes. This needs an objective whose terms are sums over positions (`Objective.sums_by_position`)
and a model whose attention takes an `Exchange`.

Letters in shapes: B rows, T positions of a row, P processes that share them, t = T / P positions of a slice, N heads, D
size of a head, K slots of masked positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terakoya.errors import UserError
from terakoya.toolkit.architectures.attention import EXCHANGE, QUERIES, Attend
from terakoya_parallel.region_borders import Border, all_gather, reduce_scatter

WHOLE = "document_ids"
"""The array (B, T) that every process needs whole: it says which positions may attend to each other."""
MASKED_POSITIONS, MASKED_LABELS = "masked_positions", "masked_labels"
"""Indices (K,) into the flattened rows, and the labels there (K,)."""


def own_positions(
    batch: Mapping[str, Tensor], exchange: UlyssesExchange | KeyValueExchange | None
) -> Mapping[str, Any]:
    """Returns the part of `batch` at this process's positions, with the `exchange` that gives attention whole rows; all
    of it without one."""
    if exchange is None:
        return batch
    size, rest = divmod(batch[WHOLE].shape[1], dist.get_world_size(exchange.group))
    assert not rest, "checked when the parameters are read"
    first = dist.get_rank(exchange.group) * size
    part = {**slice_positions(batch, first, size), EXCHANGE: exchange}
    return {**part, QUERIES: slice(first, first + size)} if isinstance(exchange, KeyValueExchange) else part


def slice_positions(batch: Mapping[str, Tensor], first: int, size: int) -> dict[str, Tensor]:
    """Returns the part of `batch`, whose rows are (B, T), at `size` positions of each row, from `first` on.

    Arrays (B, T) become (B, `size`), except for `document_ids`, which stays whole. Of masked positions those within the
    slice remain, as indices into the flattened slices. Other entries do not change.
    """
    rows, length = batch[WHOLE].shape
    positions = slice(first, first + size)
    part = {
        name: value[:, positions] if value.shape == (rows, length) and name != WHOLE else value
        for name, value in batch.items()
    }
    if MASKED_POSITIONS in batch:
        row, position = batch[MASKED_POSITIONS] // length, batch[MASKED_POSITIONS] % length
        inside = (position >= first) & (position < first + size)
        part[MASKED_POSITIONS] = (row * size + position - first)[inside]
        part[MASKED_LABELS] = batch[MASKED_LABELS][inside]
    return part


class UlyssesExchange:
    """An `attention.Exchange` among the processes of `group`, whose slices are in the order of their ranks. Every
    process must call it equally often, in evaluation too."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.processes = dist.get_world_size(group)
        self.border = Border(self._all_to_all, self._all_to_all)

    def __call__(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the result of `attend` over whole rows, at the positions of this process's slice, (B, t, N, D).

        `query` is (B, N, t, D); `key` and `value` may have fewer heads, each for equally many neighbouring query heads.

        Raises:
            UserError: the heads of `query` cannot be divided evenly among the processes.
        """
        if query.shape[1] % self.processes:
            raise UserError(
                f"parallel.sp_size {self.processes}: {query.shape[1]} attention heads cannot be shared evenly; give "
                "sp_size a value that divides them"
            )
        states = [query, self._repeat_heads(key), self._repeat_heads(value)]
        return self._scatter(attend(*self._gather(_cast(states))))

    def _repeat_heads(self, states: Tensor) -> Tensor:
        """`states` (B, N, t, D) with heads repeated until processes can divide them evenly: each process then has the
        heads that belong to its query heads."""
        heads = states.shape[1]
        times = math.lcm(heads, self.processes) // heads
        return states if times == 1 else states.repeat_interleave(times, dim=1)

    def _gather(self, states: list[Tensor]) -> list[Tensor]:
        """Exchanges positions for heads: each of `states` (B, N, t, D) becomes (B, N / P, T, D)."""
        outgoing = [each.unflatten(1, (self.processes, -1)).movedim(1, 0) for each in states]  # (P, B, N / P, t, D)
        sizes = [each[0].numel() for each in outgoing]
        received = self.border.enter(torch.cat([each.flatten(1) for each in outgoing], dim=1))
        pairs = zip(received.split(sizes, dim=1), outgoing, strict=True)
        return [part.view(sent.shape).movedim(0, 2).flatten(2, 3) for part, sent in pairs]

    def _scatter(self, attended: Tensor) -> Tensor:
        """Exchanges heads for positions: `attended` (B, T, N / P, D) becomes (B, t, N, D)."""
        outgoing = attended.unflatten(1, (self.processes, -1)).movedim(1, 0)  # (P, B, t, N / P, D)
        return self.border.leave(outgoing.flatten(1)).view(outgoing.shape).movedim(0, 2).flatten(2, 3)

    def _all_to_all(self, parts: Tensor) -> Tensor:
        """Sends part i of `parts` (P, n) to process i; returns the received parts, in the order of processes."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received


class KeyValueExchange:
    """An `attention.Exchange` like `UlyssesExchange`, for batches with `attention.QUERIES`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        positions = 2
        self.border = Border(
            partial(all_gather, axis=positions, group=group), partial(reduce_scatter, axis=positions, group=group)
        )

    def __call__(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the result of `attend`, (B, t, N, D), for `query` (B, N, t, D) and the keys and values of whole rows.
        `key` and `value` may have fewer heads."""
        query, key, value = _cast([query, key, value])
        whole = self.border.enter(torch.cat([key, value], dim=-1))  # one message for both
        return attend(query, *whole.split([key.shape[-1], value.shape[-1]], dim=-1))


def _cast(states: list[Tensor]) -> list[Tensor]:
    """Casts `states` as autocast would in attention, which is after twice as many bytes were sent."""
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return states
    return [each.to(torch.get_autocast_dtype(device)) for each in states]
