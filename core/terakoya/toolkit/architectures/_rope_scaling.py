"""`rope_scaling`: rotary positions that are slowed down, so that a model reads longer rows than it was trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

NEEDED = {
    "linear": frozenset[str](),
    "yarn": frozenset({"original_max_position_embeddings"}),
    "llama3": frozenset({"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}
"""What each type needs besides `factor`."""
OPTIONAL = {"yarn": frozenset({"attention_factor", "beta_fast", "beta_slow"})}
"""What a type may have besides."""
DYNAMIC = (
    'rope_type: "dynamic" lets the positions of a row depend on the longest row so far, and training on the order of '
    "rows; multiply rope_theta by factor ** (d / (d - 2)) instead, for heads of d dimensions: the same scaling (NTK), "
    "fixed"
)


class RopeScaling(BaseModel):
    """Keys and meanings are those of Transformers' `rope_scaling`: "linear" (Chen et al., 2023, arXiv:2306.15595),
    "yarn" (Peng et al., 2023, arXiv:2309.00071) and "llama3", of Llama 3.1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rope_type: Literal["linear", "yarn", "llama3"]
    """How frequencies are scaled: all alike, or the slow ones only ("yarn", "llama3")."""
    factor: Annotated[float, Field(ge=1, strict=False)]
    """How many times longer rows become."""
    original_max_position_embeddings: PositiveInt | None = None
    """The longest row that the model was trained on before. Unit: tokens. For "yarn" and "llama3"."""
    attention_factor: Annotated[PositiveFloat | None, Field(strict=False)] = None
    """For "yarn": what queries and keys are multiplied by; null is 0.1 ln(factor) + 1."""
    beta_fast: Annotated[PositiveFloat | None, Field(strict=False)] = None
    """For "yarn": dimensions with more turns than this in the original length stay as they are; null is 32."""
    beta_slow: Annotated[PositiveFloat | None, Field(strict=False)] = None
    """For "yarn": dimensions with fewer turns than this are slowed down by the whole factor; null is 1."""
    low_freq_factor: Annotated[PositiveFloat | None, Field(strict=False)] = None
    """For "llama3": as `beta_slow`."""
    high_freq_factor: Annotated[PositiveFloat | None, Field(strict=False)] = None
    """For "llama3": as `beta_fast`."""

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        if isinstance(value, dict):
            value = {("rope_type" if key == "type" else key): each for key, each in value.items()}
            if value.get("rope_type") == "dynamic":
                raise ValueError(DYNAMIC)
        return value

    @model_validator(mode="after")
    def _has_its_own_keys(self) -> Self:
        needed, given = NEEDED[self.rope_type], self.model_dump(exclude_none=True).keys() - {"rope_type", "factor"}
        missing, foreign = sorted(needed - given), sorted(given - needed - OPTIONAL.get(self.rope_type, frozenset()))
        if missing:
            raise ValueError(f'{missing[0]}: rope_type "{self.rope_type}" needs it')
        if foreign:
            raise ValueError(f'{foreign[0]}: rope_type "{self.rope_type}" has no such key')
        return self

    def rope_parameters(self, theta: float) -> dict[str, Any]:
        """Returns Transformers' `rope_parameters` for the base `theta`."""
        return {**self.model_dump(exclude_none=True), "rope_theta": theta}
