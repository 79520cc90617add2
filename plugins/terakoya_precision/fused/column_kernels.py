"""Triton kernels whose sums over rows are gradients of biases: the backward of GELU, and matrices put side by side.

Each program adds up the rows of its own group, and `column_sums` adds up the groups in their order: without atomics a
kernel returns the same bits each time.

Letters in shapes: N rows, C columns, P groups of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TILE = {"tile_rows": 16, "tile_columns": 128, "num_warps": 4}
SUM_TILE = {"tile_rows": 64, "tile_columns": 32, "num_warps": 4}


@triton.jit
def gelu_backward_kernel(  # type: ignore[no-untyped-def]
    gradient, states, of_states, sums, count, width,
    is_tanh: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Writes the gradient (N, C) of the states before GELU, and this program's sum of it over rows (P, C) float32."""
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    summed = tl.zeros((tile_rows, tile_columns), tl.float32)
    for first in range(tl.program_id(0) * tile_rows, count, tl.num_programs(0) * tile_rows):
        rows = first + tl.arange(0, tile_rows)
        inside = (rows < count)[:, None] & (columns < width)[None, :]
        places = rows.to(tl.int64)[:, None] * width + columns[None, :]
        given = tl.load(gradient + places, inside, 0.0).to(tl.float32)
        values = tl.load(states + places, inside, 0.0).to(tl.float32)
        if is_tanh:
            # tanh(u) = 2 sigmoid(2u) - 1, u = sqrt(2/pi) (x + 0.044715 x^3)
            sigmoid = tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
            slope = 1.5957691216057308 * (1.0 + 0.134145 * values * values)
            result = given * sigmoid * (1.0 + values * (1.0 - sigmoid) * slope)
        else:
            share = 0.5 * (1.0 + tl.erf(values * 0.7071067811865476))
            result = given * (share + values * 0.3989422804014327 * tl.exp(-0.5 * values * values))
        summed += result
        tl.store(of_states + places, result.to(of_states.dtype.element_ty), inside)
    tl.store(sums + tl.program_id(0) * width + columns, tl.sum(summed, 0), columns < width)


@triton.jit
def join_kernel(  # type: ignore[no-untyped-def]
    first_matrix, second_matrix, third_matrix, joined, sums, count, width, first_stride, second_stride, third_stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Writes three matrices (N, C) side by side (N, 3C), and this program's sum over rows (P, 3C) float32."""
    part = tl.program_id(2)
    matrix, stride = first_matrix, first_stride
    if part == 1:
        matrix, stride = second_matrix, second_stride
    if part == 2:
        matrix, stride = third_matrix, third_stride
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    summed = tl.zeros((tile_rows, tile_columns), tl.float32)
    for first in range(tl.program_id(0) * tile_rows, count, tl.num_programs(0) * tile_rows):
        rows = first + tl.arange(0, tile_rows)
        inside = (rows < count)[:, None] & (columns < width)[None, :]
        long = rows.to(tl.int64)[:, None]
        values = tl.load(matrix + long * stride + columns[None, :], inside, 0.0)
        summed += values.to(tl.float32)
        tl.store(joined + long * 3 * width + part * width + columns[None, :], values, inside)
    own = sums + tl.program_id(0) * 3 * width + part * width + columns
    tl.store(own, tl.sum(summed, 0), columns < width)


@triton.jit
def column_sums_kernel(parts, sums, count, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the sums (C,) of parts (P, C), both float32."""
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    summed = tl.zeros((tile_rows, tile_columns), tl.float32)
    for first in range(0, count, tile_rows):
        rows = first + tl.arange(0, tile_rows)
        inside = (rows < count)[:, None] & (columns < width)[None, :]
        summed += tl.load(parts + rows[:, None] * width + columns[None, :], inside, 0.0)
    tl.store(sums + columns, tl.sum(summed, 0), columns < width)


def gelu_backward(gradient: Tensor, states: Tensor, approximate: str, of_states: Tensor, sums: Tensor) -> None:
    """Writes `of_states` (N, C) and `sums` (P, C) of contiguous inputs."""
    count, width = states.shape
    grid = (len(sums), triton.cdiv(width, TILE["tile_columns"]))
    gelu_backward_kernel[grid](
        gradient, states, of_states, sums, count, width, is_tanh=approximate == "tanh", **TILE
    )  # fmt: skip


def join(matrices: Sequence[Tensor], joined: Tensor, sums: Tensor) -> None:
    """Writes `joined` (N, 3C) and `sums` (P, 3C) of three matrices (N, C) with contiguous rows."""
    count, width = matrices[0].shape
    grid = (len(sums), triton.cdiv(width, TILE["tile_columns"]), 3)
    join_kernel[grid](*matrices, joined, sums, count, width, *(each.stride(0) for each in matrices), **TILE)


def column_sums(parts: Tensor, sums: Tensor) -> None:
    """Writes `sums` (C,) of contiguous `parts` (P, C)."""
    count, width = parts.shape
    column_sums_kernel[(triton.cdiv(width, SUM_TILE["tile_columns"]),)](parts, sums, count, width, **SUM_TILE)
