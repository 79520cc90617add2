"""AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), with and without bias correction."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat

from terakoya import hookimpl
from terakoya.components import Optimizer
from terakoya.toolkit.parameter_groups import Beta, decay_groups, trainable_parameters

if TYPE_CHECKING:
    import torch


class AdamW(Optimizer):
    """AdamW with weight decay on matrices only, not on biases and norms (parameters of fewer than two dimensions).

    Without `bias_correction` it is the optimizer of the original BERT and ELECTRA: moments start at zero and are used
    uncorrected.
    """

    supports_mup: ClassVar[bool] = True

    weight_decay: NonNegativeFloat = 0.01
    """The weight decay of matrices; biases and norms have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay rates of the first and of the second moment."""
    eps: PositiveFloat = 1e-8
    """A small number added to the root of the second moment, against division by zero."""
    bias_correction: bool = True
    """Whether the moments are corrected for their start at zero. False is the optimizer of the original BERT and
    ELECTRA."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        import torch

        from terakoya_plugins.optimizers.adamw.uncorrected import UncorrectedAdamW

        groups = decay_groups(trainable_parameters(module), self.weight_decay)
        kind = torch.optim.AdamW if self.bias_correction else UncorrectedAdamW
        return kind(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=fused)


@hookimpl
def register_optimizers() -> dict[str, type[Optimizer]]:
    return {"adamw": AdamW}
