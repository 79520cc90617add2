"""StableAdamW's update of all weights of a group in three Triton kernels: sums of squares, learning rates, updates.

A program has a piece of one tensor, which it finds by the addresses of all tensors. The sums of a tensor's pieces are
added up in their order: without atomics a kernel returns the same bits each time.

Letters in shapes: T tensors, P pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PIECE = 1 << 15
"""Elements of a tensor that a program has, at most."""
TILE = {"piece": PIECE, "tile": 2048, "num_warps": 8}
SUM_TILE = {"tile": 256, "num_warps": 4}


@triton.jit
def _values(addresses, owner):  # type: ignore[no-untyped-def]
    """The float32 values of the tensor `owner` among those at `addresses`."""
    return tl.load(addresses + owner).to(tl.pointer_type(tl.float32))


@triton.jit
def _correction(step, log_beta):  # type: ignore[no-untyped-def]
    """1 - beta ** step, in float64: of the first steps float32 would lose digits."""
    return 1.0 - tl.exp(step.to(tl.float64) * log_beta)


@triton.jit
def square_sums_kernel(  # type: ignore[no-untyped-def]
    gradients, squares, steps, sizes, owners, numbers, sums, beta, rest, log_beta, smallest,
    piece: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Writes each piece's sum (P,) of gradient ** 2 / second moment, which includes this step's gradient."""
    owner, first = tl.load(owners + tl.program_id(0)), tl.load(numbers + tl.program_id(0)).to(tl.int64) * piece
    size, gradient, square = tl.load(sizes + owner), _values(gradients, owner), _values(squares, owner)
    correction = _correction(tl.load(_values(steps, owner)) + 1.0, log_beta).to(tl.float32)
    summed = tl.zeros((tile,), tl.float32)
    for start in range(first, tl.minimum(first + piece, size), tile):
        places = start + tl.arange(0, tile)
        given = tl.load(gradient + places, places < size, 0.0)
        moment = (beta * tl.load(square + places, places < size, 1.0) + rest * given * given) / correction
        summed += given * given / tl.maximum(moment, smallest)
    tl.store(sums + tl.program_id(0), tl.sum(summed, 0))


@triton.jit
def rates_kernel(sums, steps, sizes, bounds, found_inf, rates, learning_rate, skips: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the learning rate (T,) of each tensor by the sums (P,) of its pieces, and adds 1 to its step, unless it is
    skipped."""
    owner = tl.program_id(0)
    last = tl.load(bounds + owner + 1)
    summed = tl.zeros((tile,), tl.float32)
    for start in range(tl.load(bounds + owner), last, tile):
        places = start + tl.arange(0, tile)
        summed += tl.load(sums + places, places < last, 0.0)
    mean = tl.sum(summed, 0) / tl.load(sizes + owner).to(tl.float32)
    tl.store(rates + owner, learning_rate / tl.maximum(tl.sqrt(mean), 1.0))
    step = _values(steps, owner)
    if skips:
        tl.store(step, tl.load(step) + 1.0 - tl.load(found_inf))
    else:
        tl.store(step, tl.load(step) + 1.0)


@triton.jit
def update_kernel(  # type: ignore[no-untyped-def]
    weights, gradients, means, squares, steps, sizes, owners, numbers, found_inf, rates,
    first_beta, first_rest, first_log_beta, beta, rest, log_beta, weight_decay, eps,
    skips: tl.constexpr, piece: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Writes weights and moments after AdamW's step with the learning rate (T,) of each tensor, unless that is
    skipped."""
    if skips:  # noqa: SIM102 - where nothing skips there is no number to load
        if tl.load(found_inf) != 0.0:
            return
    owner, first = tl.load(owners + tl.program_id(0)), tl.load(numbers + tl.program_id(0)).to(tl.int64) * piece
    size, rate, step = tl.load(sizes + owner), tl.load(rates + owner), tl.load(_values(steps, owner))
    weight, gradient = _values(weights, owner), _values(gradients, owner)
    mean, square = _values(means, owner), _values(squares, owner)
    share = rate / _correction(step, first_log_beta).to(tl.float32)
    root = tl.sqrt(_correction(step, log_beta).to(tl.float32))
    for start in range(first, tl.minimum(first + piece, size), tile):
        places = start + tl.arange(0, tile)
        inside = places < size
        given = tl.load(gradient + places, inside, 0.0)
        momentum = first_beta * tl.load(mean + places, inside, 0.0) + first_rest * given
        moment = beta * tl.load(square + places, inside, 0.0) + rest * given * given
        value = tl.load(weight + places, inside, 0.0)
        value -= rate * weight_decay * value
        value -= share * momentum / (tl.sqrt(moment) / root + eps)
        tl.store(mean + places, momentum, inside)
        tl.store(square + places, moment, inside)
        tl.store(weight + places, value, inside)


def square_sums(addresses: Tensor, pieces: Tensor, sizes: Tensor, sums: Tensor, *numbers: float) -> None:
    """Writes `sums` (P,). `addresses` (3, T) are those of gradients, second moments and steps; `pieces` (2, P) the
    tensor of each piece and its number there; `numbers` are beta, 1 - beta, its logarithm and the least moment."""
    square_sums_kernel[(len(sums),)](*addresses, sizes, *pieces, sums, *numbers, **TILE)


def rates(
    sums: Tensor, steps: Tensor, sizes: Tensor, bounds: Tensor, found_inf: Tensor | None, learning_rate: float,
    result: Tensor,
) -> None:  # fmt: skip
    """Writes `result` (T,) and the numbers at the addresses `steps` (T,); `bounds` (T + 1,) are the pieces of each."""
    rates_kernel[(len(result),)](
        sums, steps, sizes, bounds, found_inf, result, learning_rate, skips=found_inf is not None, **SUM_TILE
    )


def update(
    addresses: Tensor, pieces: Tensor, sizes: Tensor, found_inf: Tensor | None, rates: Tensor, *numbers: float
) -> None:
    """Updates the tensors at `addresses` (5, T): weights, gradients, both moments and steps. `numbers` are beta,
    1 - beta and its logarithm of both moments, the weight decay and eps."""
    update_kernel[(pieces.shape[1],)](
        *addresses, sizes, *pieces, found_inf, rates, *numbers, skips=found_inf is not None, **TILE
    )
