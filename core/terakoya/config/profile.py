"""The part `profile` of the parameter JSON: which steps are recorded in detail."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from terakoya.config.settings import Settings


class Profile(Settings):
    """Which steps are traced, operation by operation, and timed, phase by phase. A traced step is slower."""

    steps: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False, examples=[[100, 105]])] = (100, 105)
    """The first and the last traced step, counted from 1. RUN/profile gets traces for https://ui.perfetto.dev, of rank
    0 and of the slowest rank; the log and the report get the time of each phase. Unit: optimizer steps."""

    @model_validator(mode="after")
    def _are_in_order(self) -> Self:
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"steps: expected the first and the last step, got {list(self.steps)}")
        return self
