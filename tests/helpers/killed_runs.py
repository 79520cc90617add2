"""A run that is killed and goes on, beside the same one that nobody disturbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import toy
from saved_weights import FAULTS, same_weights


def kill_and_resume(
    settings: Mapping[str, Any],
    folder: Path,
    *arguments: str,
    nodes: Sequence[int] = (1,),
    after: int = 8,
    resumed_at: int = 5,
) -> tuple[str, str]:
    """Trains into `straight`, and into `cut`, where the last rank gets SIGKILL right after the step `after`, before the
    same command continues the run from its checkpoint of step `resumed_at`. Fails unless losses, validations and
    weights of both are the same, bit for bit. Returns what rank 0 printed of the first and of the resumed run."""
    straight, cut = folder / "straight", folder / "cut"
    said = toy.train(settings, straight, *arguments, nodes=nodes, plugins=FAULTS)
    killed = {"FAULT": f"kill:{after}", "FAULT_RANK": str(sum(nodes) - 1)}
    toy.train(settings, cut, *arguments, nodes=nodes, plugins=FAULTS, environment=killed, code=None)
    last = max(toy.records(straight))
    assert max(toy.records(cut)) < last
    resumed = toy.train(settings, cut, *arguments, nodes=nodes, plugins=FAULTS)
    assert "resumed from" in resumed and f"at step {resumed_at}" in resumed
    assert toy.losses(cut) == toy.losses(straight)
    validated = [
        {step: each["loss"] for step, each in toy.records(out, "validation").items()} for out in (cut, straight)
    ]
    assert validated[0] == validated[1]
    assert same_weights(cut, straight, last)
    return said, resumed
