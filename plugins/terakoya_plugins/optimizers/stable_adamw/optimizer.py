"""StableAdamW (Wortsman et al., 2023, arXiv:2304.13013): AdamW with Adafactor's update clipping, the optimizer of
ModernBERT."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat

from terakoya import hookimpl
from terakoya.components import Optimizer
from terakoya.toolkit.parameter_groups import Beta, decay_groups, trainable_parameters

if TYPE_CHECKING:
    import torch


class StableAdamW(Optimizer):
    """AdamW whose learning rate is divided, for each tensor, by the root mean square of gradient / sqrt(second moment)
    where that is above 1: where gradients have become larger than the second moment has learnt. It stands in for
    clipping the gradient's norm: ModernBERT has `max_grad_norm` 0.

    The weight decay is multiplied by the same learning rate. It has the state of `adamw`, and its updates where nothing
    is clipped.
    """

    elementwise: ClassVar[bool] = False
    tensorwise: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True

    weight_decay: NonNegativeFloat = 0.01
    """The weight decay of matrices; biases and norms have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """The decay rates of the first and of the second moment."""
    eps: PositiveFloat = 1e-6
    """A small number added to the root of the second moment, against division by zero."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns the optimizer over two groups, with and without weight decay; torch's fused kernels are there for
        every device that trains."""
        from terakoya_plugins.optimizers.stable_adamw.clipped import ClippedAdamW

        return ClippedAdamW(
            decay_groups(trainable_parameters(module), self.weight_decay),
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            fused=True,
        )


@hookimpl
def register_optimizers() -> dict[str, type[Optimizer]]:
    return {"stable_adamw": StableAdamW}
