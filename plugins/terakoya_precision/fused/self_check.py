"""Whether the fused kernels compute on this GPU what torch's own operations compute, tried before a run takes them.

Letters in shapes: N rows, H width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from terakoya_precision.fused import ops

ROWS = 1000
"""Enough for every program to have several, and a number that no tile divides."""
DROPOUT = 0.25
TOLERANCE = 0.01
"""How far a result may be from that of float32, as a share of its norm: bf16 rounds by 0.002 on average."""
MANY_SIGMA = 6.0


def failure(device: torch.device, widths: Sequence[int]) -> str | None:
    """Returns what is wrong with the kernels on `device`, for hidden states of `widths`; None where they are right. The
    generators of the run stay as they are."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Triton about its own defaults
            torch.manual_seed(1)
            for width in widths:
                for problem in _problems(device, width):
                    return f"{problem}, at width {width}"
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises is why they are not used
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:200]}"
    return None


def _problems(device: torch.device, width: int) -> Iterator[str]:
    """Yields what is wrong at `width`."""
    for dropout in (0.0, DROPOUT):
        yield from _of_sum_norm(device, width, dropout)
    for approximate in ("none", "tanh"):
        gradient, states = _draw(device, width), _draw(device, width).requires_grad_()
        of_states, parts = ops.gelu_backward(gradient, states.detach(), approximate)
        exact = states.detach().float().requires_grad_()
        F.gelu(exact, approximate=approximate).backward(gradient.float())
        assert exact.grad is not None
        yield from _differences(
            "gelu_backward", [(of_states, exact.grad), (ops.column_sums(parts), exact.grad.sum(0))]
        )  # fmt: skip
    matrices = [_draw(device, width) for _ in range(3)]
    joined, parts = ops.join(*matrices)
    side_by_side = torch.cat(matrices, 1)
    if not torch.equal(joined, side_by_side):
        yield "join moves values"
    yield from _differences("join", [(ops.column_sums(parts), side_by_side.float().sum(0))])


def _of_sum_norm(device: torch.device, width: int, dropout: float) -> Iterator[str]:
    """Yields what is wrong with dropout, sum and norm, forward and backward."""
    states, residual, gradient = (_draw(device, width) for _ in range(3))
    weight, bias = (torch.randn(width, device=device).bfloat16() for _ in range(2))
    seed = ops.draw_seed(device) if dropout else None
    normed, total, *row_facts = ops.sum_norm(states, residual, weight, bias, seed, dropout, 1e-12)
    kept = torch.ones_like(states)
    if dropout:
        ones = torch.ones_like(states)
        kept = (ops.sum_norm(ones, torch.zeros_like(ones), weight, bias, seed, dropout, 1e-12)[1] != 0).to(states.dtype)
        sigma = (dropout * (1.0 - dropout) / kept.numel()) ** 0.5
        if abs(kept.float().mean().item() - (1.0 - dropout)) > MANY_SIGMA * sigma:
            yield f"dropout {dropout} keeps {kept.float().mean().item():.4f}"
    of_total, of_states, parts = ops.sum_norm_backward(gradient, total, *row_facts, weight, seed, dropout)
    again = ops.sum_norm_backward(gradient, total, *row_facts, weight, seed, dropout)
    if not all(torch.equal(one, other) for one, other in zip((of_total, of_states, parts), again, strict=True)):
        yield "sum_norm_backward returns other bits when it runs again"
    if dropout and not torch.equal(of_states != 0, (kept != 0) & (of_total != 0)):
        yield "the backward does not drop what the forward dropped"
    exact = [each.float().requires_grad_() for each in (states, residual, weight, bias)]
    expected = F.layer_norm(exact[0] * kept / (1.0 - dropout) + exact[1], (width,), exact[2], exact[3], 1e-12)
    expected.backward(gradient.float())
    wanted = [each.grad for each in exact]
    of_weight, of_bias, of_before = ops.column_sums(parts)
    yield from _differences("sum_norm", [(normed, expected.detach())])
    pairs = zip((of_states if dropout else of_total, of_total, of_weight, of_bias), wanted, strict=True)
    yield from _differences("sum_norm_backward", [(got, each) for got, each in pairs if each is not None])
    rounded = (of_states if dropout else of_total).float()
    if (of_before - rounded.sum(0)).norm() > TOLERANCE * rounded.norm():
        yield "sum_norm_backward adds up another gradient than it returns"


def _draw(device: torch.device, width: int) -> Tensor:
    return torch.randn(ROWS, width, device=device).bfloat16()


def _differences(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[str]:
    """Yields what differs between what the kernel `name` returned and what it should have."""
    for number, (got, expected) in enumerate(pairs):
        off = float((got.float() - expected).norm() / expected.norm())
        if not off <= TOLERANCE:  # NaN is not
            yield f"result {number} of {name} is off by {off:.2%}"
