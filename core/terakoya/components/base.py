"""The base of every component: settings, frozen and strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Component(BaseModel):
    """The settings of one replaceable part. Subclasses add fields; unknown keys, NaN and Infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    phase_settings: ClassVar[frozenset[str]] = frozenset()
    """Settings of an architecture or an objective that a phase of a run may change: nothing that is built before the
    first step depends on them. Of an objective, they are read by `collate` alone; of an architecture, they decide the
    base of rotary positions or the window of local attention alone."""
    test_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings with which `terakoya plugins check` and the project's tests try this component in seconds: small sizes,
    and a value for each field without a default. Sizes with the usual names may be left out."""
