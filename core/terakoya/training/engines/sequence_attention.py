"""Attention over rows whose positions several processes share (DeepSpeed-Ulysses; Jacobs et al., 2023,
arXiv:2309.14509).

All but attention looks at one position at a time, so a process that has a slice of every row needs no other one for it.
In attention each process gives away all heads but its share of them, gets that share of the heads of all other
positions, attends in whole rows, and gives positions back for heads.

Letters in shapes: B rows, T positions of a row, P processes that share them, t = T / P positions of a slice, N heads, D
size of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terakoya.errors import UserError
from terakoya.toolkit.architectures.attention import Attend


class UlyssesExchange:
    """An `attention.Exchange` among the processes of `group`, whose slices stand in the order of their ranks. Every one
    of them calls it as often as the others, in evaluation too."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.processes = dist.get_world_size(group)

    def __call__(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What `attend` makes of whole rows at the positions of this process's slice, (B, t, N, D).

        `query` (B, N, t, D); `key` and `value` may have fewer heads, each for as many neighbouring ones of `query`.

        Raises:
            UserError: the processes cannot share the heads of `query` evenly.
        """
        if query.shape[1] % self.processes:
            raise UserError(
                f"parallel.sp_size {self.processes}: {query.shape[1]} attention heads cannot be shared evenly; give "
                "sp_size a value that divides them"
            )
        states = [query, self._enough(key), self._enough(value)]
        device = query.device.type
        if torch.is_autocast_enabled(device):  # attention would do the same, but then twice as much had to travel
            states = [each.to(torch.get_autocast_dtype(device)) for each in states]
        return self._scatter(attend(*self._gather(states)))

    def _enough(self, states: Tensor) -> Tensor:
        """`states` (B, N, t, D) with each head so often in a row that processes can share them evenly: each then has
        those that belong to its share of the query's."""
        heads = states.shape[1]
        times = math.lcm(heads, self.processes) // heads
        return states if times == 1 else states.repeat_interleave(times, dim=1)

    def _gather(self, states: list[Tensor]) -> list[Tensor]:
        """Each of `states` (B, N, t, D) with this process's share of the heads at all positions, (B, N / P, T, D)."""
        pieces = [each.unflatten(1, (self.processes, -1)).movedim(1, 0) for each in states]  # (P, B, N / P, t, D)
        sizes = [piece[0].numel() for piece in pieces]
        got = _AllToAll.apply(torch.cat([piece.flatten(1) for piece in pieces], dim=1), self.group)
        parts = zip(got.split(sizes, dim=1), pieces, strict=True)
        return [part.view(piece.shape).movedim(0, 2).flatten(2, 3) for part, piece in parts]

    def _scatter(self, attended: Tensor) -> Tensor:
        """`attended` (B, T, N / P, D) with all heads at the positions of this process's slice, (B, t, N, D)."""
        pieces = attended.unflatten(1, (self.processes, -1)).movedim(1, 0)  # (P, B, t, N / P, D)
        got: Tensor = _AllToAll.apply(pieces.flatten(1), self.group)
        return got.view(pieces.shape).movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Piece i of `pieces` (P, n) goes to process i of `group`; returned are those that came, (P, n), in the order of
    processes. What is done to gradients on their way back is the same."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(pieces, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces = pieces.contiguous()
    got = torch.empty_like(pieces)
    dist.all_to_all_single(got, pieces, group=group)
    return got
