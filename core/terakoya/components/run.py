"""The view of a run that hooks receive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from terakoya.components.architecture import Architecture
from terakoya.components.objective import Objective
from terakoya.components.progress import Length, Progress
from terakoya.components.tensor_shard import TensorShard
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from torch import nn


SAVE_REQUEST = "save.request"
"""The file in the run's folder by which another program requests a checkpoint."""


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
        validation_rows: a hash of the rows that a validation takes: only values with the same one can be compared.
        tokenizer_folder: a Transformers folder with the tokenizer of the stores.
        holds_whole_model: whether this process holds every weight of `module`, so that it can run it alone.
        ended_by: why the run ends before its length; None where it does not.
        forked_at: the step at which the run has left another one; None where it is no fork.
    """

    folder: Path
    tokenizer_folder: Path
    holds_whole_model: bool
    ended_by: str | None
    forked_at: int | None
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
    validation_rows: str

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def progress(self) -> Progress: ...
    def reduce(self, values: Mapping[str, float]) -> dict[str, float]: ...

    def weight_shards(self) -> Sequence[TensorShard]:
        """Returns the trained float32 weights, each element on one of all ranks: on rank 0 where every rank has whole
        weights, else on each rank its part. Steps change the values in place."""

    def optimizer_shards(self) -> Iterator[tuple[str, TensorShard]]:
        """Yields the optimizer's state, each element on one of all ranks, as `PARAMETER/STATE`, and before it the
        settings of its group. Steps change the values in place."""

    def request_save(self) -> None:
        """Requests a checkpoint; any rank may. All ranks save after the same step: after this one where the request
        comes from `validation_finished`, else after one of the next two."""

    def request_end(self, reason: str) -> None:
        """Requests that the run ends as if it had reached its length; any rank may. It ends at the same step on all
        ranks: at this one where the request comes from `run_started` or `validation_finished`, else within two."""

    def write(self, kind: str, **values: Any) -> None:
        """Appends a record of `kind` to metrics.jsonl, with the step; does nothing on other ranks than 0."""

    def write_text(self, name: str, text: str) -> None:
        """Gives `text` to the trackers that show texts; does nothing on other ranks than 0."""

    def write_numbers(self, values: Mapping[str, float]) -> None:
        """Gives finite numbers by name to the trackers; does nothing on other ranks than 0."""

    def print(self, text: str) -> None:
        """Prints a line above the progress; does nothing on other ranks than 0."""

    def warn(self, text: str) -> None:
        """Prints a warning, and records it in metrics.jsonl; does nothing on other ranks than 0."""
