"""The settings of a fine-tuning: what is tried, and how a model is trained each time."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LONGEST, SHORTEST = 512, 8
"""Default number of tokens of an input, for models that take more, and the fewest that may be asked for."""


class TuningSettings(BaseModel):
    """How a model is fine-tuned. All pairs of a learning rate and a number of epochs are tried with the first seed; the
    best one by the first score on the evaluation examples is trained with the other seeds, too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rates: tuple[Rate, ...] = Field(default=(5e-5,), min_length=1)
    """Peak learning rates."""
    epochs: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(3,), min_length=1)
    """Numbers of times that the training examples are seen."""
    seeds: int = Field(default=1, ge=1)
    """Number of seeds, 1 to this: of the head's first weights, the order of examples, and dropout."""
    batch_size: int = Field(default=32, ge=1)
    """Examples of a step."""
    max_length: int | None = Field(default=None, ge=SHORTEST)
    """Largest number of tokens of an input; by default 512, or the model's limit if that is less."""
    stride: int = Field(default=128, ge=1)
    """Tokens that two windows over a long context share, for questions answered by a text."""
    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the steps in which the learning rate grows from 0."""
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """AdamW's weight decay, of matrices alone."""
