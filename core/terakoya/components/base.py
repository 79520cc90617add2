"""What every component is: settings, frozen and strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Component(BaseModel):
    """Settings of one replaceable part. Subclasses add fields; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trial: ClassVar[Mapping[str, Any]] = {}
    """Settings to try this component with in seconds, as `terakoya plugins check` and the project's tests do: small
    sizes, and a value for whatever has no default. Usual names of sizes need no mention."""
