"""Optimizers and learning-rate schedules."""

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
    """The peak learning rate, which is multiplied by the schedule's factor."""

    elementwise: ClassVar[bool] = True
    """Whether the update of each weight depends on that weight's own numbers only, so that processes may split tensors.
    Where it is False, a group of the torch optimizer that has `"elementwise": True` says so of its own weights."""

    tensorwise: ClassVar[bool] = False
    """Where updates are not elementwise: whether each depends on the numbers of its own tensor only. Engines that split
    tensors (`fsdp`, ZeRO, tensor parallelism) then give each tensor to one process, whole: `step` updates the tensors
    of its groups at that moment, which are some of those that `build` was given, or none. Engines refuse an optimizer
    that is neither."""

    supports_mup: ClassVar[bool] = False
    """Whether the key `mup` may set a learning rate for each group: updates have about the size of the learning rate,
    whatever the size of gradients and weights, and weight decay is multiplied by it. In r times the width matrices get
    1 / r of the learning rate, as Adam needs it; in a group of the torch optimizer with `"width_power": p` they get
    1 / r^p."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns a torch optimizer over the trainable parameters of `module`, with separate groups for decay and no
        decay. `fused` says whether torch's fused kernels fit the device."""
        raise NotImplementedError


class Schedule(Component):
    """The learning rate over the run: a pure function of the run's progress. `terakoya.toolkit.schedules` has bases for
    warm-up and decay, by steps or by tokens."""

    needs_validation: ClassVar[bool] = False
    """Whether the schedule uses validation losses: a run without `evaluation` is then refused."""

    def check(self, start: Progress) -> None:
        """Raises UserError where the settings do not fit the run. Called once before the run, with its first
        progress."""

    def factor(self, progress: Progress) -> float:
        """Returns the factor of the peak learning rate for the optimizer step that follows `progress`."""
        raise NotImplementedError
