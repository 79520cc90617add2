"""Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235): second moments as a row and a column for each matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from terakoya import hookimpl
from terakoya.components import Optimizer
from terakoya.toolkit.parameter_groups import decay_groups, trainable_parameters

if TYPE_CHECKING:
    import torch


class Adafactor(Optimizer):
    """torch's Adafactor: updates are relative to the root mean square of each tensor's weights, so `learning_rate` is a
    share of it, in step t at most 1 / sqrt(t). The schedule `inverse_square_root` and 0.01 are T5's.

    Settings are torch's: `beta2_decay` is how fast second moments average over more steps; `eps` the smallest second
    moment (null is the machine epsilon) and the smallest root mean square of weights; `d` the bound on an update's root
    mean square.
    """

    elementwise: ClassVar[bool] = False
    tensorwise: ClassVar[bool] = True

    learning_rate: PositiveFloat = 0.01
    """The peak learning rate, as a share of the root mean square of each tensor's weights."""
    weight_decay: NonNegativeFloat = 0.0
    """The weight decay of matrices; biases and norms have none."""
    beta2_decay: Annotated[float, Field(le=0.0)] = -0.8
    """The power of the step with which second moments average over more steps; 0 or less."""
    eps: tuple[NonNegativeFloat | None, NonNegativeFloat] = (None, 1e-3)
    """The smallest second moment (null is the machine epsilon), and the smallest root mean square of weights."""
    d: Annotated[float, Field(ge=1.0)] = 1.0
    """The bound on the root mean square of an update."""

    test_settings: ClassVar = {"learning_rate": 0.3}

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """torch's Adafactor over two groups, with and without weight decay; it has no fused kernels."""
        from terakoya_plugins.optimizers.adafactor.without_waiting import AdafactorWithoutWaiting

        return AdafactorWithoutWaiting(
            decay_groups(trainable_parameters(module), self.weight_decay),
            lr=self.learning_rate,
            beta2_decay=self.beta2_decay,
            eps=self.eps,
            d=self.d,
        )


@hookimpl
def register_optimizers() -> dict[str, type[Optimizer]]:
    return {"adafactor": Adafactor}
