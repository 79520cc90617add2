"""A rate that is one number, or changes along the run, such as the share of masked tokens that falls from 30 to 15 %
(Ankner et al., 2023, arXiv:2305.15096; mmBERT, Marone et al., 2025, arXiv:2509.06888)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from terakoya.json_settings import explain, short_json

OpenShare = Annotated[float, Field(gt=0.0, lt=1.0)]


class ChangingRate(BaseModel):
    """A rate that goes from `start` to `end` in the first `until` of the run, and stays there."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    start: Annotated[OpenShare, Field(description="The rate of the first step, between 0 and 1.")]
    end: Annotated[OpenShare, Field(description="The rate from `until` on, between 0 and 1.")]
    until: Annotated[
        float, Field(gt=0.0, le=1.0, description="The share of the run after which the rate is `end`.")
    ] = 1.0
    shape: Annotated[Literal["linear", "cosine"], Field(description="The shape of the change.")] = "linear"

    def at(self, progress: float) -> float:
        """Returns the rate of a step before which the share `progress` of the run is finished, 0 to 1."""
        share = min(1.0, progress / self.until)
        if self.shape == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        return self.start + (self.end - self.start) * share if share < 1.0 else self.end


class _RateField:
    """Annotates a field that holds a number between 0 and 1 or a `ChangingRate`, each as JSON has it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Either of the two, with one error."""
        serialise = core_schema.plain_serializer_function_ser_schema(self._serialise)
        return core_schema.no_info_plain_validator_function(self._validate, serialization=serialise)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A number, or an object."""
        number = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [number, {**ChangingRate.model_json_schema(), "title": "ChangingRate"}]}

    def _validate(self, value: Any) -> float | ChangingRate:
        if isinstance(value, ChangingRate):
            return value
        if isinstance(value, Mapping):
            try:
                return ChangingRate.model_validate(dict(value))
            except ValidationError as error:
                raise ValueError("; ".join(explain(error, ChangingRate))) from None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < 1.0:
            return float(value)
        raise ValueError(
            'expected a number above 0 and below 1, or an object such as {"start": 0.3, "end": 0.15}, got '
            f"{short_json(value)}"
        )

    def _serialise(self, value: float | ChangingRate) -> Any:
        return value.model_dump(mode="json") if isinstance(value, ChangingRate) else value


Rate = Annotated[float | ChangingRate, _RateField()]
"""A setting that is a number between 0 and 1, or the object of a `ChangingRate`."""


def rate_at(rate: float | ChangingRate, progress: float) -> float:
    """Returns the rate of a step before which the share `progress` of the run is finished, 0 to 1."""
    return rate.at(progress) if isinstance(rate, ChangingRate) else rate


def largest_rate(rate: float | ChangingRate) -> float:
    """Returns the largest rate of the run, for arrays of one size in all steps."""
    return max(rate.start, rate.end) if isinstance(rate, ChangingRate) else rate
