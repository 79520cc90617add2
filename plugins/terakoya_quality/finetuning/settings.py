"""The settings of a fine-tuning: what is tried, and how a model is trained each time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from terakoya.components import Optimizer, Schedule
from terakoya.errors import UserError
from terakoya.json_settings import short_json
from terakoya.plugins import registry
from terakoya.plugins.create import create_component


def _read_component(value: Any) -> Any:
    """Returns the settings of a component that a name, or JSON on a command line, means."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("{") else {"type": value}


Named = Annotated[Mapping[str, Any], BeforeValidator(_read_component)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LONGEST, SHORTEST = 512, 8
"""Default number of tokens of an input, for models that take more, and the fewest that may be asked for."""


HIGHEST_RATE = 5e-4
MUON = {"type": "muon", "norm_factor": 0.25, "momentum": 0.9, "betas": [0.8, 0.95]}
MUON_RATES = {4_000_000: 5e-3, 10_000_000: 2.5e-3}
"""The optimizer of small models, and its rate for those of fewer parameters than a key: models of 2.6 and 7.5 million
learn more with it than with AdamW (docs/how-to/quality.md); larger ones were not compared."""


def muon_rate(parameters: int) -> float | None:
    """Returns Muon's learning rate for a model of so many parameters; None for those that AdamW fine-tunes."""
    return next((rate for below, rate in MUON_RATES.items() if parameters < below), None)


FEWEST_EPOCHS, MOST_EPOCHS, FEWEST_STEPS = 3, 20, 500
"""Epochs at least and at most, and the steps that few examples are repeated for in between: where a rate is warmed up
and falls within 40 steps, hardly anything is learned (docs/how-to/quality.md; Mosbach et al. 2021, arXiv:2006.04884,
train BERT for 20 epochs on few examples)."""


def suited_epochs(steps: int) -> int:
    """Returns a number of epochs where each has so many steps."""
    return min(MOST_EPOCHS, max(FEWEST_EPOCHS, math.ceil(FEWEST_STEPS / steps)))


def suited_rate(parameters: int) -> float:
    """Returns a learning rate of AdamW for a model of so many parameters: that of a BERT base, 5e-5 for 110 million,
    divided by the square root of its size relative to that.

    BERTs of 110 and 340 million are fine-tuned with 2e-5 to 5e-5 (Devlin et al. 2019, appendix A.3), those of 4 to 41
    million with up to 3e-4 (Turc et al. 2019); docs/how-to/quality.md has what was measured with 2.6 and 5 million.
    """
    return min(HIGHEST_RATE, float(f"{5e-5 * math.sqrt(110e6 / parameters):.1e}"))


class TuningSettings(BaseModel):
    """How a model is fine-tuned. All pairs of a learning rate and a number of epochs are tried with the first seed; the
    best one by the first score on the evaluation examples is trained with the other seeds, too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rates: tuple[Rate, ...] | None = Field(default=None, min_length=1)
    """Peak learning rates; null is one that suits the model's size, see `for_model`."""
    epochs: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1)
    """Numbers of times that the training examples are seen; null is one that suits how many there are: 3, and up to 20
    for less than 500 steps."""
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
    """Weight decay, of matrices alone; of an optimizer that has it and none of its own in `optimizer`."""
    optimizer: Named | None = None
    """An optimizer of `terakoya plugins list`: its name, or an object with its `type` and settings. Null is AdamW, but
    for models of less than 10 million parameters Muon, where no learning rate is given and texts have labels, not their
    tokens."""
    schedule: Named | None = None
    """A schedule in the same way, with `warmup_ratio` where it names no other warm-up; null is a linear warm-up from 0
    and a linear way down to 0, as in the scripts of BERT and GLUE."""

    @model_validator(mode="after")
    def _check_components(self) -> Self:
        try:
            self.make_optimizer((self.learning_rates or (HIGHEST_RATE,))[0])
            self.make_schedule()
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    def for_model(self, parameters: int, *, suits_muon: bool = True) -> TuningSettings:
        """Returns the settings for a model of so many parameters, with an optimizer and rates; `suits_muon` says
        whether the task is one that small models learn best with it. Raises UserError for an optimizer without a rate,
        but for AdamW and, of small models, Muon."""
        optimizer, rates, of_muon = self.optimizer, self.learning_rates, muon_rate(parameters)
        if optimizer is None:
            optimizer = MUON if rates is None and of_muon and suits_muon else {"type": "adamw"}
        if rates is None and optimizer["type"] == "muon" and of_muon:
            rates = (of_muon,)
        elif rates is None and optimizer["type"] in ("adamw", "stable_adamw"):
            rates = (suited_rate(parameters),)
        elif rates is None:
            raise UserError(f"--learning-rate: expected one for {optimizer['type']} and a model of this size")
        return self.model_copy(update={"optimizer": optimizer, "learning_rates": rates})

    def make_optimizer(self, learning_rate: float) -> Optimizer:
        """Returns the optimizer with a peak learning rate. Raises UserError for wrong settings."""
        name, settings = self._split_name("optimizer", self.optimizer or {"type": "adamw"}, "learning_rate")
        given = {"learning_rate": learning_rate, "weight_decay": self.weight_decay, **settings}
        fields = registry().component("optimizers", name).model_fields
        taken = {key: value for key, value in given.items() if key in settings or key in fields}
        made: Optimizer = create_component("optimizers", name, taken, where="optimizer")
        return made

    def make_schedule(self) -> Schedule | None:
        """Returns the schedule; None is Transformers' linear one. Raises UserError for wrong settings, and for one that
        does not depend on steps alone."""
        if self.schedule is None:
            return None
        name, settings = self._split_name("schedule", self.schedule, "warmup_tokens", "lr_decay_tokens")
        fields = registry().component("schedules", name).model_fields
        if "warmup_ratio" in fields and "warmup_steps" not in settings:
            settings = {"warmup_ratio": self.warmup_ratio, **settings}
        made: Schedule = create_component("schedules", name, settings, where="schedule")
        if made.needs_validation:
            raise UserError(
                f"schedule: {name} follows validation losses, which a fine-tuning has none of; take another"
            )
        return made

    @staticmethod
    def _split_name(key: str, value: Mapping[str, Any], *others: str) -> tuple[str, dict[str, Any]]:
        """Returns the name and the settings of a component, which are none of the `others`."""
        settings = dict(value)
        name = settings.pop("type", None)
        if not isinstance(name, str):
            raise UserError(f'{key}: expected a name, or an object with a "type", got {short_json(value)}')
        for each in sorted(settings.keys() & set(others)):
            raise UserError(f"{key}.{each}: a fine-tuning has its own learning rates, and counts steps; leave it out")
        return name, settings
