"""The part `data` of the parameter JSON: the stores of a run, their shares of the rows and the order of the rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PlainSerializer, PositiveFloat, PositiveInt, model_validator

from terakoya.config.settings import Settings
from terakoya.places import as_written

StorePath = Annotated[Path, Field(strict=False), PlainSerializer(as_written, return_type=str)]
"""The folder of a token store, or a place such as s3://bucket/store, of which `Path` keeps one slash alone."""
StepRange = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]


class TrainStore(Settings):
    """A token store and its share of the rows. In JSON a plain string is a store of weight 1."""

    store: StorePath
    """The folder of a token store, as `terakoya prepare` writes it, or the address of a copy, such as
    `s3://bucket/store`."""
    weight: PositiveFloat = 1.0
    """The store's share of the rows, relative to the weights of the other stores."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"store": value} if isinstance(value, str | Path) else value


class DataStage(Settings):
    """Another mixture of stores: optimizer step `from_step`, counted from 1, is the first that uses it."""

    from_step: Annotated[int, Field(ge=2)]
    """The first optimizer step that uses this mixture, counted from 1. Unit: optimizer steps."""
    train: Annotated[tuple[TrainStore, ...], Field(strict=False, min_length=1)]
    """The stores from this step on, with their shares of the rows. A store that was used before continues where it was.
    """


class Data(Settings):
    """The data of a run."""

    train: Annotated[tuple[TrainStore, ...], Field(strict=False, min_length=1, examples=[["work/store"]])]
    """The token stores to train on, with their shares of the rows: folders, or objects with `store` and `weight`."""
    validation: Annotated[tuple[StorePath, ...], Field(strict=False, examples=[["work/validation"]])] = ()
    """The token stores to validate on; or give `split`."""
    split: Annotated[
        Annotated[tuple[NonNegativeFloat, ...], Field(strict=False, min_length=2, max_length=3)] | None,
        Field(examples=[[998, 1, 1]]),
    ] = None
    """Shares of the documents of each training store for training, for validation and, as an optional third, for
    neither, such as a test set: [998, 1, 1]. The parts are contiguous, in the order of the store, as with Megatron-LM's
    --split."""
    sequence_length: Annotated[int, Field(ge=8, examples=[128, 512])]
    """The length of a row. Unit: tokens."""
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    """Other mixtures of stores from later steps on."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """The order of the rows. `sequential` reads them in the order of the store, if the layout has one."""
    skip_steps: Annotated[tuple[StepRange, ...], Field(strict=False, examples=[[[1200, 1210]]])] = ()
    """Ranges [first, last] of optimizer steps, counted from 1, that are skipped: their rows count as consumed, and no
    weight changes. Unit: optimizer steps."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.split is not None:
            if self.validation:
                raise ValueError("split: takes validation from the training stores; give split or validation, not both")
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

    def odd_split(self) -> str | None:
        """Returns what a split means whose shares add up to no round number; None where they do."""
        total = sum(self.split or (1,))
        if math.isclose(math.log10(total), round(math.log10(total)), abs_tol=1e-6):
            return None
        of = [f"{share / total:.2%}" for share in self.split or ()]
        return f"data.split: the shares add up to {total:g}; of the documents {of[0]} train and {of[1]} validate"

    @property
    def has_validation(self) -> bool:
        """Whether there is data to validate on."""
        return bool(self.validation or (self.split and self.split[1]))

    def skips(self, step: int) -> bool:
        """Whether optimizer step `step`, counted from 0, is skipped."""
        return any(first <= step + 1 <= last for first, last in self.skip_steps)
