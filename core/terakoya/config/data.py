"""The part `data` of a parameter JSON: which stores a run reads, in which shares and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator


class Settings(BaseModel):
    """A strict, frozen part of the parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


StorePath = Annotated[Path, Field(strict=False)]
StepRange = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]


class TrainStore(Settings):
    """A token store and its share of the rows. JSON may give a plain string for weight 1."""

    store: StorePath
    weight: PositiveFloat = 1.0

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"store": value} if isinstance(value, str | Path) else value


class DataStage(Settings):
    """Another mixture of stores: optimizer step `from_step`, counted from 1, is the first that takes its rows."""

    from_step: Annotated[int, Field(ge=2)]
    train: Annotated[tuple[TrainStore, ...], Field(strict=False, min_length=1)]


class Data(Settings):
    """What is read.

    Attributes:
        train: stores to train on, with their shares of the rows.
        validation: stores to validate on; or
        split: the shares of the documents of each training store for training, validation and, where a third is given,
            for nothing, such as a test: `[998, 1, 1]`. Contiguous, in the order of the store, as Megatron's --split.
        sequence_length: of a row, in tokens.
        stages: other mixtures from later steps on; a store goes on where it stood.
        order: `sequential` takes rows in the order of the store, where the layout has one.
        skip_steps: [first, last] of optimizer steps, counted from 1, whose rows are passed over: they count as taken,
            and change nothing.
    """

    train: Annotated[tuple[TrainStore, ...], Field(strict=False, min_length=1)]
    validation: Annotated[tuple[StorePath, ...], Field(strict=False)] = ()
    split: Annotated[tuple[NonNegativeFloat, ...], Field(strict=False, min_length=2, max_length=3)] | None = None
    sequence_length: Annotated[int, Field(ge=8)]
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    order: Literal["shuffled", "sequential"] = "shuffled"
    skip_steps: Annotated[tuple[StepRange, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.split is not None:
            if self.validation:
                raise ValueError("split: cuts validation out of the training stores; give it or validation, not both")
            if not self.split[0]:
                raise ValueError(f"split: expected a first share above 0, for training, got {list(self.split)}")
        steps = [stage.from_step for stage in self.stages]
        if steps != sorted(set(steps)):
            raise ValueError(f"stages: expected from_step to rise from stage to stage, got {steps}")
        for number, stage in enumerate(self.stages):
            named = [each.store for each in stage.train]
            if len(set(named)) < len(named):
                raise ValueError(f"stages.{number}: names a store twice; give it one weight")
        for first, last in self.skip_steps:
            if last < first:
                raise ValueError(f"skip_steps: expected [first, last] with first <= last, got {[first, last]}")
        return self

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.validation or (self.split and self.split[1]))

    def skips(self, step: int) -> bool:
        """Whether optimizer step `step`, counted from 0, is passed over."""
        return any(first <= step + 1 <= last for first, last in self.skip_steps)
