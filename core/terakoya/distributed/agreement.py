"""What the processes of a run were given is compared when they meet: none goes on where it differs.

Only hashes travel while all is well; what was given follows where two of them differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from terakoya.distributed.topology import ProcessInfo
from terakoya.json_settings import short_json

Given = Mapping[str, Any]
"""What a process was given, as JSON by name: what explains other differences comes first."""
SHOWN = 5
"""How many differences a message names."""
_ABSENT = object()


def digest(given: Given) -> str:
    """Returns a hash of what a process was given, whatever its order."""
    return hashlib.sha256(json.dumps(dict(given), sort_keys=True).encode()).hexdigest()


def describe_differences(given: Sequence[Given], processes: Sequence[ProcessInfo]) -> str:
    """Returns what two of the `processes`, by rank, were not given alike: name, both values, ranks and hosts, each
    difference in a line of its own."""
    lines = []
    for name in dict.fromkeys(name for each in given for name in each):
        values = [each.get(name, _ABSENT) for each in given]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            ours, theirs = (processes[rank] for rank in (0, others[0]))
            line = (
                f"{name}: {_show(values[0])} on rank 0 ({ours.host}), {_show(values[others[0]])} on rank {others[0]} "
                f"({theirs.host})"
            )
            lines.append(line + (f" and {len(others) - 1} more ranks" if len(others) > 1 else ""))
    shown = lines[:SHOWN] + ([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])
    return "\n".join(f"  {line}" for line in shown)


def _show(value: object) -> str:
    return "nothing" if value is _ABSENT else short_json(value)
