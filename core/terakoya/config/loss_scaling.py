"""The part `loss_scaling` of a parameter JSON: how fp16's scale begins, rises and falls."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from terakoya.config.data import Settings


class LossScaling(Settings):
    """How the loss's scale goes, in fp16. Names and defaults are those of torch's GradScaler, which accelerate takes
    over; `hysteresis` and `min_scale` are Megatron-LM's and DeepSpeed's (`min_loss_scale`).

    Attributes:
        init_scale: the first step's scale.
        growth_factor: what it is multiplied with after `growth_interval` steps in a row without an overflow.
        backoff_factor: what it is multiplied with where gradients overflow, once `hysteresis` steps did since it last
            rose.
        min_scale: what it does not fall below; a run that would need less ends.
        fixed: a scale that stays as it is; null lets it rise and fall.
    """

    init_scale: PositiveFloat = 65536.0
    growth_factor: Annotated[float, Field(gt=1.0)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    growth_interval: PositiveInt = 2000
    hysteresis: PositiveInt = 1
    min_scale: PositiveFloat = 1.0
    fixed: PositiveFloat | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        fields = type(self).model_fields
        moved = [name for name in fields if name != "fixed" and getattr(self, name) != fields[name].default]
        if self.fixed is not None and moved:
            raise ValueError(f"fixed {self.fixed:g} leaves nothing to {', '.join(moved)}; set fixed to null, or leave "
                             f"{'it' if len(moved) == 1 else 'them'} out")  # fmt: skip
        if self.init_scale < self.min_scale:
            raise ValueError(f"init_scale: expected at least min_scale, {self.min_scale:g}, got {self.init_scale:g}")
        return self
