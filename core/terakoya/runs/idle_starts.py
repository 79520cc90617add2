"""Starts of a finished run that changed nothing: there was nothing left to train, or the start was refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terakoya.runs.metrics import Metrics

TRAINING = frozenset({"step", "checkpoint", "skipped", "spike", "rollback", "stopped", "fork"})
"""The records of a start that went on. A validation shows nothing: a finished run repeats its last."""


def without_idle_starts(written: Metrics) -> Metrics:
    """Returns `written` as if a finished run had only been started again where that trained more. A start that was
    refused becomes a warning."""
    kept: list[Mapping[str, Any]] = []
    later: list[Mapping[str, Any]] = []  # of a start after the end, as long as nothing shows that it trains
    finished_step: int | None = None
    for record in written.records:
        kind = record.get("kind")
        if finished_step is None:
            kept.append(record)
            finished_step = record.get("step") if kind == "finished" else None
            continue
        later.append(record)
        if kind in TRAINING or (kind == "finished" and record.get("step") != finished_step):
            kept, later = [*kept, *later], []
            finished_step = record.get("step") if kind == "finished" else None
        elif kind == "error" and any(each.get("kind") == "start" for each in later):
            kept, later, finished_step = [*kept, *later], [], None
        elif kind == "error":
            text = f"a start after the end was refused: {record.get('text')}"
            kept, later = [*kept, {**record, "kind": "warning", "text": text}], []
        elif kind == "finished":
            kept, later = [*kept, *(each for each in later if each.get("kind") == "warning")], []
    return replace(written, records=(*kept, *later))
