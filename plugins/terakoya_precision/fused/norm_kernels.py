"""Triton kernels for dropout, residual sum and layer norm in one pass, forward and backward.

Which values dropout keeps is a function of a seed on the device, the row and the column (Philox-4x32, Salmon et al.,
2011, SC), so the backward computes it again and no mask is stored. Sums over rows are those of fixed groups of rows,
one a program, which `column_kernels` adds up: without atomics a kernel returns the same bits each time.

Letters in shapes: N rows, H width, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

FORWARD_TILE, BACKWARD_TILE = (1024, 512), (2048, 256)
"""Elements that a program holds at once, unless a row is longer, and those of a warp: so that the backward, which also
holds sums, leaves room for three programs on a multiprocessor."""


@triton.jit
def _find_kept(seed, rows, tile_columns: tl.constexpr, threshold):  # type: ignore[no-untyped-def]
    """What dropout keeps of `rows` (R,): (R, tile_columns) bool. Each Philox call decides about four neighbours."""
    columns = tl.arange(0, tile_columns // 4)[None, :] + tl.zeros_like(rows)[:, None]
    zeros = tl.zeros_like(columns)
    first, second, third, fourth = tl.philox(seed, columns, rows[:, None] + zeros, zeros, zeros)
    bits = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(rows.shape[0], tile_columns)
    return (bits >> 1).to(tl.int32) < threshold


@triton.jit(do_not_specialize=["threshold"])
def sum_norm_kernel(  # type: ignore[no-untyped-def]
    states, residual, weight, bias, seed, normed, total, mean, deviation,
    count, width, threshold, scale, eps,
    has_dropout: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Writes the sum (N, H) of the residual and what dropout leaves of the states, its layer norm (N, H), and the mean
    and the reciprocal standard deviation (N,) of each row."""
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.arange(0, tile_columns)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(states + places, inside, 0.0).to(tl.float32)
    if has_dropout:
        values = tl.where(_find_kept(tl.load(seed), rows, tile_columns, threshold), values * scale, 0.0)
    values += tl.load(residual + places, inside, 0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)  # the norm is that of what the backward reads
    tl.store(total + places, rounded, inside)
    values = rounded.to(tl.float32)
    center = tl.sum(values, 1) / width
    values = tl.where(inside, values - center[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(mean + rows, center, rows < count)
    tl.store(deviation + rows, inverse, rows < count)
    factor = tl.load(weight + columns, columns < width, 0.0).to(tl.float32)
    summand = tl.load(bias + columns, columns < width, 0.0).to(tl.float32)
    values = values * inverse[:, None] * factor[None, :] + summand[None, :]
    tl.store(normed + places, values.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["threshold"])
def sum_norm_backward_kernel(  # type: ignore[no-untyped-def]
    gradient, total, mean, deviation, weight, seed, of_total, of_states, sums,
    count, width, threshold, scale,
    has_dropout: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Writes the gradients (N, H) of the sum and of the states before dropout, and this program's three sums over rows
    (P, 3, H) float32: gradients of weight and bias, and the gradient of the states."""
    columns = tl.arange(0, tile_columns)
    factor = tl.load(weight + columns, columns < width, 0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros((tile_rows, tile_columns), tl.float32)
    of_bias = tl.zeros((tile_rows, tile_columns), tl.float32)
    dropped = tl.zeros((tile_rows, tile_columns), tl.float32)
    for first in range(tl.program_id(0) * tile_rows, count, tl.num_programs(0) * tile_rows):
        rows = first + tl.arange(0, tile_rows)
        inside = (rows < count)[:, None] & (columns < width)[None, :]
        places = rows.to(tl.int64)[:, None] * width + columns[None, :]
        given = tl.load(gradient + places, inside, 0.0).to(tl.float32)
        values = tl.load(total + places, inside, 0.0).to(tl.float32)
        center = tl.load(mean + rows, rows < count, 0.0)[:, None]
        inverse = tl.load(deviation + rows, rows < count, 0.0)[:, None]
        values = tl.where(inside, (values - center) * inverse, 0.0)
        of_weight += given * values
        of_bias += given
        given *= factor
        slope = (tl.sum(given * values, 1) / width)[:, None]
        result = (given - (tl.sum(given, 1) / width)[:, None] - values * slope) * inverse
        tl.store(of_total + places, result.to(of_total.dtype.element_ty), inside)
        if has_dropout:
            result = tl.where(_find_kept(tl.load(seed), rows, tile_columns, threshold), result * scale, 0.0)
            tl.store(of_states + places, result.to(of_states.dtype.element_ty), inside)
        dropped += tl.where(inside, result, 0.0)
    own = sums + tl.program_id(0) * 3 * width + columns
    tl.store(own, tl.sum(of_weight, 0), columns < width)
    tl.store(own + width, tl.sum(of_bias, 0), columns < width)
    tl.store(own + 2 * width, tl.sum(dropped, 0), columns < width)


def tile(width: int, elements: int, of_a_warp: int) -> dict[str, int]:
    """Returns the tile of a program that holds about `elements`: whole rows of `width`, and its warps."""
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, elements // block)
    return {"tile_rows": rows, "tile_columns": block, "num_warps": min(16, max(1, rows * block // of_a_warp))}


def sum_norm(
    given: Sequence[Tensor], seed: Tensor | None, dropout: float, eps: float, results: Sequence[Tensor]
) -> None:
    """Writes `results`: normed and total (N, H), mean and deviation (N,). `given` are contiguous: states and residual
    (N, H), weight and bias (H,)."""
    count, width = given[0].shape
    sizes = tile(width, *FORWARD_TILE)
    sum_norm_kernel[(triton.cdiv(count, sizes["tile_rows"]),)](
        *given, seed, *results, count, width, threshold(dropout), scale(dropout), eps,
        has_dropout=seed is not None, **sizes,
    )  # fmt: skip


def sum_norm_backward(given: Sequence[Tensor], seed: Tensor | None, dropout: float, results: Sequence[Tensor]) -> None:
    """Writes `results`: gradients of the total and of the states (N, H), the second only with a `seed`, and sums over
    rows (P, 3, H). `given` are contiguous: gradient and total (N, H), mean and deviation (N,), weight (H,)."""
    count, width = given[0].shape
    sum_norm_backward_kernel[(len(results[2]),)](
        *given, seed, *results, count, width, threshold(dropout), scale(dropout),
        has_dropout=seed is not None, **tile(width, *BACKWARD_TILE),
    )  # fmt: skip


def threshold(dropout: float) -> int:
    """Returns below which of 2^31 equally probable numbers a value is kept."""
    return min(round((1.0 - dropout) * 2**31), 2**31 - 1)


def scale(dropout: float) -> float:
    """Returns what is multiplied with the values that are kept."""
    return 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
