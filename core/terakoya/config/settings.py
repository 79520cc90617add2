"""The base class of every part of the parameter JSON: frozen, strict, without unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A strict, frozen part of the parameter JSON. A key that it does not declare is an error, and so are NaN and
    Infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
