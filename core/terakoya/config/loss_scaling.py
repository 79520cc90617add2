"""The part `loss_scaling` of the parameter JSON: the initial scale of fp16 losses, and how it grows and shrinks."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from terakoya.config.settings import Settings


class LossScaling(Settings):
    """The scale of fp16 losses. Names and defaults are those of torch's GradScaler, which accelerate uses too;
    `hysteresis` and `min_scale` are Megatron-LM's (`min_loss_scale`)."""

    init_scale: PositiveFloat = 65536.0
    """The scale of the first step."""
    growth_factor: Annotated[float, Field(gt=1.0)] = 2.0
    """The scale is multiplied by this after `growth_interval` steps in a row without an overflow."""
    backoff_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """The scale is multiplied by this when gradients overflow, once `hysteresis` steps have overflowed since it last
    grew."""
    growth_interval: PositiveInt = 2000
    """Steps in a row without an overflow after which the scale grows. Unit: optimizer steps."""
    hysteresis: PositiveInt = 1
    """Steps that must overflow before the scale shrinks. Unit: optimizer steps."""
    min_scale: PositiveFloat = 1.0
    """The lower bound; a run that would need a smaller scale ends."""
    fixed: PositiveFloat | None = None
    """A constant scale; null is a dynamic one."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        fields = type(self).model_fields
        changed = [name for name in fields if name != "fixed" and getattr(self, name) != fields[name].default]
        if self.fixed is not None and changed:
            remedy = "set fixed to null, or remove it" if len(changed) == 1 else "set fixed to null, or remove them"
            raise ValueError(f"fixed {self.fixed:g} leaves {', '.join(changed)} without effect; {remedy}")
        if self.init_scale < self.min_scale:
            raise ValueError(f"init_scale: expected at least min_scale, {self.min_scale:g}, got {self.init_scale:g}")
        return self
