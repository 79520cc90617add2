"""The optimizer `example`: stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveFloat
from terakoya import hookimpl
from terakoya.components import Optimizer

if TYPE_CHECKING:  # torch is imported inside methods, so that the command line stays quick
    import torch


class Example(Optimizer):
    """Fields are the keys of the parameter JSON; `learning_rate` is the peak, which the schedule multiplies."""

    # Where a weight's update depends on its whole tensor: `elementwise: ClassVar[bool] = False` and `tensorwise:
    # ClassVar[bool] = True`; on other tensors too: `elementwise` alone. Engines that split tensors ask for it.

    learning_rate: PositiveFloat = 0.05
    """The peak, which the schedule scales."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """The share of the previous update that is added to the next."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns a torch optimizer over the trainable parameters. `fused` says that torch's fused kernels fit the
        device."""
        import torch

        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trainable, lr=self.learning_rate, momentum=self.momentum, fused=fused)


@hookimpl
def register_optimizers() -> dict[str, type[Optimizer]]:
    """Registers `example`: `"optimizer": {"type": "example"}`."""
    return {"example": Example}
