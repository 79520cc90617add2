"""The state of a run in progress; `components.run.Run` is the part of it that hooks may use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from terakoya.components import Architecture, Objective, TensorShard
from terakoya.components.progress import Length, Progress
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    from terakoya.config.parameters import Parameters
    from terakoya.distributed.context import DistributedContext
    from terakoya.training.run_log import RunLog


@dataclass
class Run:
    """A run in progress, on one rank, which only the training loop changes; `components.run.Run` says what hooks read.

    Attributes:
        phase: the number of the phase of the last step, counted from 1.
        phase_tokens: the consumed tokens before that phase.
        run_log: where `write`, `print` and the like go.
        save_requested: whether an event on this rank has requested a checkpoint that is not begun yet.
        end_requested: why an event on this rank has requested the end of the run.
        ended_by: as hooks read it; the same on every rank.
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
    run_log: RunLog = field(repr=False)
    step: int = 0
    consumed_rows: int = 0
    consumed_tokens: int = 0
    phase: int = 1
    phase_tokens: int = 0
    validation_losses: tuple[tuple[int, float], ...] = ()
    validation_rows: str = ""
    tokenizer_folder: Path = Path()
    holds_whole_model: bool = True
    weight_shards: Callable[[], Sequence[TensorShard]] = field(default=tuple, repr=False)
    optimizer_shards: Callable[[], Iterator[tuple[str, TensorShard]]] = field(default=lambda: iter(()), repr=False)
    save_requested: bool = False
    end_requested: str | None = None
    ended_by: str | None = None
    forked_at: int | None = None
    start_time: float = field(default_factory=time.perf_counter)

    @property
    def max_steps(self) -> int:
        """The run's length in steps; an estimate where its length is given in tokens."""
        return self.length.steps

    @property
    def built_parameters(self) -> Parameters:
        """The parameters with the architecture that the module has now."""
        return self.parameters.built_in(self.phase)

    @property
    def finished(self) -> bool:
        """Whether the run has reached its length, or was ended by an event plugin."""
        return self.ended_by is not None or self.length.is_reached(step=self.step, tokens=self.consumed_tokens)

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
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def device(self) -> torch.device:
        return self.context.device

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the sum of each value over the ranks that have it. Collective."""
        ranks = self.context.gather(dict(values))
        return {name: sum(each.get(name, 0.0) for each in ranks) for name in sorted(set().union(*ranks))}

    # ------------------------------------------------------------------------- what events may do; see components.run

    def request_save(self) -> None:
        self.save_requested = True

    def request_end(self, reason: str) -> None:
        """Requests that the run ends here; the first reason counts."""
        self.end_requested = self.end_requested or reason

    def write(self, kind: str, **values: Any) -> None:
        self.run_log.write(kind, step=self.step, **values)

    def write_text(self, name: str, text: str) -> None:
        self.run_log.track(self.step, {name: text})

    def write_numbers(self, values: Mapping[str, float]) -> None:
        self.run_log.track(self.step, values)

    def print(self, text: str) -> None:
        self.run_log.print(text)

    def warn(self, text: str) -> None:
        self.run_log.warn(text)
