"""AdamW with a learning rate for each tensor, which stays on the device: in kernels of our own on a GPU, elsewhere with
torch's fused AdamW."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terakoya.toolkit.gpu_compiler import missing_tools
from terakoya_plugins.optimizers.stable_adamw import grouped

MOST_AT_ONCE = 1 << 26
"""Elements of the tensors for which root mean squares are computed together: they need a copy of that size."""


class ClippedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, with its settings, its state and its `found_inf`, and update clipping."""

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None, "terakoya computes gradients before"
        has_kernels = self.has_kernels
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            if weights and has_kernels and all(_is_plain(each) for each in weights):
                names = ("lr", "betas", "weight_decay", "eps")
                grouped.update(self._tensors(weights), self.found_inf, **{name: group[name] for name in names})
                continue
            for part in _together(weights):
                self._update(part, group)
        return None

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether weights are on a GPU for which Triton writes kernels: on every rank, since other kernels round
        otherwise, and ranks must keep the same weights. Collective."""
        devices = {each.device.type for group in self.param_groups for each in group["params"]}
        if not (devices == {"cuda"} or (not devices and torch.cuda.is_initialized())):  # a rank may own no tensor
            return False
        device = torch.device("cuda", torch.cuda.current_device())
        lacking = [missing_tools(device) is not None]
        if dist.is_initialized():
            lacking = [False] * dist.get_world_size()
            dist.all_gather_object(lacking, missing_tools(device) is not None)
        return not any(lacking)

    def _tensors(self, weights: list[Tensor]) -> tuple[list[Tensor], ...]:
        states = [self._state_of(each) for each in weights]
        gradients: list[Tensor] = [each.grad for each in weights]  # type: ignore[misc]
        return weights, gradients, *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))

    def _update(self, weights: list[Tensor], group: Mapping[str, Any]) -> None:
        _, gradients, first, second, steps = self._tensors(weights)
        torch._foreach_add_(steps, 1)
        rates = learning_rates(gradients, second, steps, group)
        for weight, gradient, mean, square, step, rate in zip(
            weights, gradients, first, second, steps, rates, strict=True
        ):
            torch._fused_adamw_(
                [weight], [gradient], [mean], [square], [], [step],
                lr=rate, beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
                eps=group["eps"], amsgrad=False, maximize=False, found_inf=self.found_inf,
            )  # fmt: skip
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state


def learning_rates(
    gradients: list[Tensor], second: list[Tensor], steps: list[Tensor], group: Mapping[str, Any]
) -> Sequence[Tensor]:
    """Returns the learning rate () of each tensor: that of `group` / max(1, RMS(gradient / second moment's root)).

    The second moment includes this step's gradient and is corrected for its start at zero.

    Args:
        gradients: one for each tensor.
        second: the second moments before this step, uncorrected.
        steps: the number of this step, from 1, () float32 each.
        group: `lr`, `betas` and `eps`.
    """
    beta, smallest = group["betas"][1], group["eps"] ** 2
    moments = torch._foreach_mul(second, beta)
    torch._foreach_addcmul_(moments, gradients, gradients, 1 - beta)
    corrections = torch._foreach_mul(steps, math.log(beta) if beta else -math.inf)
    torch._foreach_expm1_(corrections)  # beta ** step - 1
    torch._foreach_neg_(corrections)
    torch._foreach_div_(moments, corrections)
    torch._foreach_clamp_min_(moments, smallest)
    torch._foreach_sqrt_(moments)
    torch._foreach_reciprocal_(moments)
    torch._foreach_mul_(moments, gradients)
    norms = torch._foreach_norm(moments)
    rates = torch._foreach_div(norms, [math.sqrt(each.numel()) for each in gradients])
    torch._foreach_clamp_min_(rates, 1.0)
    torch._foreach_reciprocal_(rates)
    torch._foreach_mul_(rates, group["lr"])
    return rates


def _together(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields `weights` in parts of at most `MOST_AT_ONCE` elements, or one tensor."""
    part: list[Tensor] = []
    for each in weights:
        if part and sum(tensor.numel() for tensor in part) + each.numel() > MOST_AT_ONCE:
            yield part
            part = []
        part.append(each)
    if part:
        yield part


def _is_plain(weight: Tensor) -> bool:
    """Whether `weight` and its gradient are float32 values one after another, which the kernels read."""
    return all(
        each is not None and each.dtype == torch.float32 and each.is_contiguous() for each in (weight, weight.grad)
    )
