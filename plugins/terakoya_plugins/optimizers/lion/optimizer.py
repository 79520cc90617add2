"""Lion (Chen et al., 2023, arXiv:2302.06675): the sign of an average of gradients updates every weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat

from terakoya import hookimpl
from terakoya.components import Optimizer
from terakoya.errors import import_extra
from terakoya.toolkit.parameter_groups import Beta, decay_groups, trainable_parameters

if TYPE_CHECKING:
    import torch


class Lion(Optimizer):
    """lion-pytorch's Lion, with one moment instead of AdamW's two. Its authors use a learning rate 3 to 10 times lower
    than AdamW's, and a weight decay higher by the same factor."""

    supports_mup: ClassVar[bool] = True

    weight_decay: NonNegativeFloat = 0.1
    """The weight decay of matrices; biases and norms have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """The decay rates of the mixture whose sign is the update, and of the momentum."""

    test_settings: ClassVar = {"learning_rate": 0.003}

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """lion-pytorch's Lion over two groups, with and without weight decay.

        Raises:
            UserError: lion-pytorch is not installed.
        """
        by_groups = import_extra("terakoya_plugins.optimizers.lion.by_groups", "lion", "optimizer lion")
        optimizer: torch.optim.Optimizer = by_groups.LionByGroups(
            decay_groups(trainable_parameters(module), self.weight_decay), lr=self.learning_rate, betas=self.betas
        )
        return optimizer


@hookimpl
def register_optimizers() -> dict[str, type[Optimizer]]:
    return {"lion": Lion}
