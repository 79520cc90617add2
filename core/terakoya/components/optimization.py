"""How weights are changed, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat

from terakoya.components.base import Component
from terakoya.components.progress import Progress

if TYPE_CHECKING:
    import torch


class Optimizer(Component):
    """An optimizer for the parameters of a module."""

    learning_rate: PositiveFloat = 1e-4
    """The peak, which the schedule's factor multiplies."""

    elementwise: ClassVar[bool] = True
    """Whether each weight's update looks at that weight's own numbers alone, so that ZeRO may cut parameters up."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """A torch optimizer over `module`'s trainable parameters, decay and no-decay in groups of their own."""
        raise NotImplementedError


class Schedule(Component):
    """The learning rate's course: a pure function of how far the run has come. `terakoya.toolkit.schedules` holds
    what most of them share: warming up, falling to a floor, by steps or by tokens."""

    needs_validation: ClassVar[bool] = False
    """Whether it looks at validation losses: a run without `evaluation` is then refused."""

    def check(self, start: Progress) -> None:
        """Called once before a run, with its first step's progress: raises UserError where settings do not fit it."""

    def factor(self, progress: Progress) -> float:
        """What the peak learning rate is multiplied with in the optimizer step that `progress` stands before."""
        raise NotImplementedError
