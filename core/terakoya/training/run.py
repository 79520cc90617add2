"""The state of a run in progress; `components.run.Run` is the part of it that hooks may use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from terakoya.components import Architecture, Objective
from terakoya.components.progress import Length, Progress
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    from terakoya.config.parameters import Parameters
    from terakoya.training.distributed.context import DistributedContext


@dataclass
class Run:
    """A run in progress, on one rank. Hooks read it; only the training loop changes it.

    Attributes:
        folder: the run's folder, the same on every rank.
        module: the root module, unwrapped.
        length: how long the run is.
        step: optimizer steps finished.
        consumed_rows: rows of the global order that those steps took.
        consumed_tokens: real tokens in those rows.
        validation_losses: (step, loss) of each validation so far; the loss is the mean over the stores.
        start_time: when this process began, on the clock `time.perf_counter`.
    """

    folder: Path
    parameters: Parameters
    architecture: Architecture
    objective: Objective
    vocabulary: Vocabulary
    module: nn.Module
    length: Length
    context: DistributedContext = field(repr=False)
    step: int = 0
    consumed_rows: int = 0
    consumed_tokens: int = 0
    validation_losses: tuple[tuple[int, float], ...] = ()
    start_time: float = field(default_factory=time.perf_counter)

    @property
    def max_steps(self) -> int:
        """The run's length in steps; an estimate where its length is given in tokens."""
        return self.length.steps

    @property
    def finished(self) -> bool:
        """Whether the run has reached its length."""
        return self.length.is_reached(step=self.step, tokens=self.consumed_tokens)

    def progress(self) -> Progress:
        """Returns the values that the schedule may use before the next step."""
        return Progress(
            step=self.step,
            max_steps=self.length.steps,
            tokens=self.consumed_tokens,
            max_tokens=self.length.tokens,
            unit=self.length.unit,
            learning_rate=self.parameters.optimizer.learning_rate,
            validation=self.validation_losses,
        )

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.context.world_size

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.context.device

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the sum over ranks of each value, for the hook `evaluate`. Collective, with equal names."""
        names = sorted(values)
        ranks = self.context.gather([values[name] for name in names])
        return {name: sum(rank[index] for rank in ranks) for index, name in enumerate(names)}
