"""What an importer's `parameters(file)` returns: the run that a launch script of the same program starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ConvertedConfig:
    """The options of another program's command line, converted to parameter JSON.

    Attributes:
        parameters: the parameter JSON, with every option that it has keys for.
        mapped: option -> the key, or keys, to which it is converted.
        ignored: option -> the reason why nothing is lost without it.
        unsupported: option -> the effect that the parameter JSON has no key for.
        notes: further facts for the reader, a sentence each.
    """

    parameters: Mapping[str, Any]
    mapped: Mapping[str, str]
    ignored: Mapping[str, str]
    unsupported: Mapping[str, str]
    notes: Sequence[str] = ()
