"""Loss scaling (Micikevicius et al., 2018, arXiv:1710.03740): shifts gradients too small for fp16 into its range.

The loss is multiplied by a scale before the backward, and gradients are divided by it afterwards. A step whose
gradients overflow is skipped and the scale falls; after enough steps without an overflow it rises. Nothing is sharded
and nothing is sent: the gradient norm is the same on all processes, so all skip the same steps and keep the same scale.
Everything stays on the device: an overflow is read when a step is logged, not before the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terakoya.config.loss_scaling import LossScaling
from terakoya.errors import Diverged

MAX_CONSECUTIVE_OVERFLOWS = 20
"""Steps in a row that may overflow under a fixed scale before the run ends with an error."""


class LossScaler:
    """The current scale and the counts from which the next scale follows.

    Attributes:
        scale: factor of the loss, () float32 on the device.
        inverse: factor of the gradients, () float32.
        counts: () int64 each: `good` and `bad` steps in a row; `hysteresis`, overflows still allowed before the scale
            falls; `skipped` steps of the run; `stuck`, overflows at the lowest scale.
    """

    def __init__(self, settings: LossScaling, device: torch.device) -> None:
        self.settings = settings
        first = settings.init_scale if settings.fixed is None else settings.fixed
        self.scale = torch.tensor(first, dtype=torch.float32, device=device)
        self.inverse = self.scale.reciprocal()
        self.counts = {
            name: torch.tensor(value, dtype=torch.int64, device=device)
            for name, value in (
                ("good", 0), ("bad", 0), ("hysteresis", settings.hysteresis), ("skipped", 0), ("stuck", 0)
            )
        }  # fmt: skip

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        """Divides the gradients of `parameters` by the scale, in place."""
        torch._foreach_mul_([each.grad for each in parameters if each.grad is not None], self.inverse)

    def unscale_gradient(self, gradient: Tensor) -> Tensor:
        """Returns one parameter's `gradient` divided by the scale: a gradient hook."""
        return gradient * self.inverse

    def update(self, norm: Tensor) -> None:
        """Computes the next step's scale from the unscaled gradient `norm`, () float32; a norm that is not finite is an
        overflow. The rules are those of torch's GradScaler, with Megatron-LM's hysteresis and lowest scale
        (megatron/core/optimizer/grad_scaler.py)."""
        settings, counts = self.settings, self.counts
        bad = ~torch.isfinite(norm)
        counts["skipped"] += bad
        counts["good"] = torch.where(bad, 0, counts["good"] + 1)
        counts["bad"] = torch.where(bad, counts["bad"] + 1, 0)
        if settings.fixed is not None:
            counts["stuck"] += counts["bad"] >= MAX_CONSECUTIVE_OVERFLOWS
            return
        counts["hysteresis"] -= bad.long()
        falls = bad & (counts["hysteresis"] <= 0)
        rises = counts["good"] >= settings.growth_interval
        counts["stuck"] += falls & (self.scale <= settings.min_scale)
        counts["hysteresis"] = torch.where(rises, settings.hysteresis, counts["hysteresis"])
        counts["good"] = torch.where(rises, 0, counts["good"])
        lower = (self.scale * settings.backoff_factor).clamp(min=settings.min_scale)
        higher = self.scale * settings.growth_factor
        self.scale = torch.where(falls, lower, torch.where(rises & torch.isfinite(higher), higher, self.scale))
        self.inverse = self.scale.reciprocal()

    def log_values(self) -> dict[str, float]:
        """Values to log: `loss_scale` of the next step, and `skipped_steps` of the run so far."""
        return {"loss_scale": float(self.scale), "skipped_steps": int(self.counts["skipped"])}

    def raise_if_stuck(self, step: int) -> None:
        """Ends the run, on every rank alike, where the scale cannot fall further: raises Diverged if gradients
        overflowed at the lowest scale, or many times in a row at a fixed scale."""
        if not int(self.counts["stuck"]):
            return
        if self.settings.fixed is not None:
            when = f"in {MAX_CONSECUTIVE_OVERFLOWS} steps in a row at the fixed loss scale {self.settings.fixed:g}"
            remedy = "set loss_scaling.fixed lower, or to null; "
        else:
            when = f"at loss scale {float(self.scale):g}, the lowest allowed (loss_scaling.min_scale)"
            remedy = ""
        raise Diverged(
            f"step {step}: gradients overflowed fp16 {when}; {int(self.counts['skipped'])} steps were skipped so "
            f"far. Either training has diverged, or a value in the model's forward is beyond 65,504, fp16's largest: "
            f'{remedy}lower optimizer.learning_rate, or train in "bf16" or "fp32"'
        )

    def state(self) -> dict[str, float]:
        """The scale and the counts, for JSON."""
        return {"scale": float(self.scale), **{name: int(value) for name, value in self.counts.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`; a fixed scale of the settings takes precedence over the saved scale."""
        for name, value in self.counts.items():
            value.fill_(state[name])
        if self.settings.fixed is None:
            self.scale.fill_(state["scale"])
            self.inverse = self.scale.reciprocal()
