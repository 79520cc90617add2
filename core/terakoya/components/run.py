"""The view of a run that hooks receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from terakoya.components.architecture import Architecture
from terakoya.components.objective import Objective
from terakoya.components.progress import Length, Progress
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class StepAnomaly:
    """What went wrong numerically in a step.

    Attributes:
        step: the step, counted from 1.
        kind: `skipped`: its loss or gradients were not finite, and no weight has changed; `spike`: its loss or gradient
            norm is far above that of the steps before.
        text: what was found, in a sentence.
    """

    step: int
    kind: Literal["skipped", "spike"]
    text: str


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: the values that the host knows without waiting for the device.

    Attributes:
        step: finished optimizer steps, including this one.
        tokens: real tokens of this step's global batch.
        learning_rate: the learning rate of this step.
        seconds: time since the end of the last step.
        values: losses and norms, averaged since the last logged step; None on steps that are not logged.
        anomalies: what was found since the last report, about this step or one of the two before.
    """

    step: int
    tokens: int
    learning_rate: float
    seconds: float
    values: Mapping[str, float] | None
    anomalies: tuple[StepAnomaly, ...] = ()


class Run(Protocol):
    """A run in progress, on one rank, as hooks see it. Hooks only read it; the loop writes to it.

    Attributes:
        folder: the run's folder, the same on every rank.
        module: the root module, unwrapped.
        length: the length of the run.
        step: finished optimizer steps.
        consumed_rows: rows of the global order that these steps took.
        consumed_tokens: real tokens in these rows.
        validation_losses: (step, loss) of each validation so far; the loss is the mean over the stores.
    """

    folder: Path
    parameters: Any
    architecture: Architecture
    objective: Objective
    vocabulary: Vocabulary
    module: nn.Module
    length: Length
    step: int
    consumed_rows: int
    consumed_tokens: int
    validation_losses: tuple[tuple[int, float], ...]

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def progress(self) -> Progress: ...
    def reduce(self, values: Mapping[str, float]) -> dict[str, float]: ...
