"""Loss scaling (Micikevicius et al., 2018, arXiv:1710.03740): gradients too small for fp16 are lifted into its range.

The loss is multiplied by a scale before the backward, gradients are divided by it after. A step whose gradients
overflow is left out, and the scale falls; after steps enough without, it rises. Everything stays on the device: whether
a step overflowed is read when a step is logged, not before the next one. Gradients are those of all processes, so that
all leave out the same steps and have the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terakoya.config.loss_scaling import LossScaling
from terakoya.errors import UserError

MAX_CONSECUTIVE_OVERFLOWS = 20
"""Steps in a row that may overflow under a fixed scale before the run is ended."""


class LossScaler:
    """The scale, and how it came to be what it is.

    Attributes:
        scale: what the loss is multiplied by, () float32 on the device.
        inverse: what gradients are multiplied by, () float32.
    """

    def __init__(self, settings: LossScaling, device: torch.device) -> None:
        self.settings = settings
        first = settings.init_scale if settings.fixed is None else settings.fixed
        self.scale = torch.tensor(first, dtype=torch.float32, device=device)
        self.inverse = self.scale.reciprocal()
        # steps in a row that did not overflow, and that did; those that may still overflow before the scale falls; all
        # that did; those that did while nothing lower was left
        self.counts = {
            name: torch.tensor(value, dtype=torch.int64, device=device)
            for name, value in (
                ("good", 0), ("bad", 0), ("hysteresis", settings.hysteresis), ("skipped", 0), ("stuck", 0)
            )
        }  # fmt: skip

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        """Takes the scale off the gradients of `parameters`."""
        torch._foreach_mul_([each.grad for each in parameters if each.grad is not None], self.inverse)

    def unscale_gradient(self, gradient: Tensor) -> Tensor:
        """One parameter's `gradient` without the scale: a hook."""
        return gradient * self.inverse

    def update(self, norm: Tensor) -> None:
        """Takes note of a step whose gradients, without the scale, had the `norm`, () float32: one that is not finite
        overflowed. The next step's scale follows: as torch's GradScaler's, with Megatron-LM's hysteresis and least
        scale (megatron/core/optimizer/grad_scaler.py)."""
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
        """What is logged: `loss_scale`, that of the next step, and `skipped_steps` of the run so far."""
        return {"loss_scale": float(self.scale), "skipped_steps": int(self.counts["skipped"])}

    def raise_if_stuck(self, step: int) -> None:
        """Ends the run, on every rank alike, where a lower scale would be needed than may be.

        Raises:
            UserError: gradients overflowed at the least scale, or again and again at a fixed one.
        """
        if not int(self.counts["stuck"]):
            return
        if self.settings.fixed is not None:
            often = f"in {MAX_CONSECUTIVE_OVERFLOWS} steps in a row at the fixed loss scale {self.settings.fixed:g}"
            remedy = "set loss_scaling.fixed lower, or to null; "
        else:
            often = f"at loss scale {float(self.scale):g}, the least there may be (loss_scaling.min_scale)"
            remedy = ""
        raise UserError(
            f"step {step}: gradients overflowed fp16 {often}; {int(self.counts['skipped'])} steps were left out so "
            f"far. Either training has diverged, or a value in the model's forward is beyond 65,504, fp16's largest: "
            f'{remedy}lower optimizer.learning_rate, or train in "bf16" or "fp32"'
        )

    def state(self) -> dict[str, float]:
        """All of it, as JSON has it."""
        return {"scale": float(self.scale), **{name: int(value) for name, value in self.counts.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`; where the scale is fixed, that of the settings stands."""
        for name, value in self.counts.items():
            value.fill_(state[name])
        if self.settings.fixed is None:
            self.scale.fill_(state["scale"])
            self.inverse = self.scale.reciprocal()
