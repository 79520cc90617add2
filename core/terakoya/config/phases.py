"""The part `phases` of the parameter JSON: parts of a run that follow each other, each with keys of its own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from terakoya.components import Schedule
from terakoya.config.data import TrainStore
from terakoya.config.settings import Settings
from terakoya.plugins.nested_component import NestedComponent

LENGTHS = ("steps", "tokens", "share")
"""The keys of which one sets the length of a phase."""


class PhaseData(Settings):
    """The data of a phase, where they differ from those of the run."""

    train: Annotated[tuple[TrainStore, ...] | None, Field(strict=False, min_length=1)] = None
    """The stores of the phase, with their shares of its rows. A store continues where its last phase with rows of the
    same length ended."""
    sequence_length: Annotated[int | None, Field(ge=8)] = None
    """The length of a row. Unit: tokens."""


class PhaseOptimizer(Settings):
    """What a phase may change of the optimizer."""

    learning_rate: PositiveFloat
    """The peak learning rate, which is multiplied by the schedule's factor."""


class Phase(Settings):
    """A part of a run, from one optimizer step to another. What it does not name is as in the rest of the JSON."""

    name: Annotated[str, Field(max_length=60, examples=["context extension"])] = ""
    """What the phase is called on the screen, in metrics, reports and the model card."""
    steps: PositiveInt | None = None
    """The length of the phase; one of `steps`, `tokens` and `share`, the same one in all phases. The last phase needs
    none: it lasts until the end of the run. Unit: optimizer steps."""
    tokens: PositiveInt | None = None
    """The length of the phase in tokens: it ends with the step that is expected to reach this number. Unit: tokens."""
    share: Annotated[float | None, Field(gt=0.0, le=1.0)] = None
    """The length of the phase as a share of the run's length, from 0 to 1."""
    data: PhaseData | None = None
    """The stores and the length of a row."""
    architecture: Annotated[dict[str, Any], Field(default_factory=dict, examples=[{"global_rope_theta": 160_000.0}])]
    """Settings of the architecture that are no sizes: the base of rotary positions, the window of local attention."""
    objective: Annotated[dict[str, Any], Field(default_factory=dict, examples=[{"mlm_probability": 0.15}])]
    """Settings of the objective that only masking depends on. A rate that changes does so from the beginning of the
    phase to its end."""
    optimizer: PhaseOptimizer | None = None
    """The peak learning rate."""
    schedule: Annotated[Schedule | None, NestedComponent("schedules", optional=True)] = None
    """The schedule of the learning rate from the beginning of the phase to its end. A phase without one follows that of
    the run, which counts from the beginning of the run."""
    batch_size: Annotated[dict[str, int] | None, Field(examples=[{"-1": 64}])] = None
    """Rows of one optimizer step on each node, for the same nodes as `batch_size` of the run. Unit: rows."""
    micro_batch_size: PositiveInt | None = None
    """Rows that one process computes at once. Unit: rows."""

    @property
    def length_key(self) -> str | None:
        """Which of `LENGTHS` the phase has; None for a phase until the end of the run."""
        return next((key for key in LENGTHS if getattr(self, key) is not None), None)
