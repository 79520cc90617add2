"""Runs in whose log a value has another type or is gone, for the programs that read logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terakoya.runs import metrics

EVERY_KIND: list[dict[str, Any]] = [
    {"kind": "start", "step": 0, "time": 1e9, "max_steps": 9, "max_tokens": None, "length_unit": "steps",
     "world": {"processes": 2, "device": "cuda"}, "devices": {"H100": 2}, "hosts": ["a"], "stores": {"s": "f"},
     "versions": {"torch": "2"}, "global_rows": 4, "parameter_count": 5, "flops_per_token": 6.0,
     "phases": [{"number": 1, "name": "", "first_step": 0, "steps": 9, "global_rows": 4, "sequence_length": 8}]},
    {"kind": "step", "step": 1, "time": 1e9 + 1, "loss": 2.0, "tokens": 5, "tokens_per_second": 5.0, "mfu": 0.5},
    {"kind": "step", "step": 2, "time": 1e9 + 2, "loss": 1.0, "tokens": 10, "tokens_per_second": 5.0, "mfu": 0.5},
    {"kind": "validation", "step": 2, "time": 1e9 + 3, "store": "s", "loss": 1.5, "masked_accuracy": 0.5},
    {"kind": "checkpoint", "step": 2, "time": 1e9 + 4, "paused": 0.1, "seconds": 0.2},
    {"kind": "skipped", "step": 2, "time": 1e9 + 4, "reason": "nan", "text": "t", "rows": [1], "documents": []},
    {"kind": "spike", "step": 2, "time": 1e9 + 4, "signal": "loss", "value": 2.0, "limit": 1.0, "text": "t"},
    {"kind": "rollback", "step": 2, "time": 1e9 + 4, "back_to": 1, "first_skipped": 2, "number": 1, "text": "t"},
    {"kind": "profile", "step": 2, "time": 1e9 + 4, "first": 1, "milliseconds": [{"forward": 1.0}], "slowest_rank": 0},
    {"kind": "task_scores", "step": 2, "time": 1e9 + 4, "scored_step": 2, "scores": {"jnli": 0.5}},
    {"kind": "sample", "step": 2, "time": 1e9 + 4, "text": "t", "masks": [[["x", 0.5]]]},
    {"kind": "warning", "step": None, "time": 1e9 + 4, "text": "t"},
    {"kind": "resume", "step": 2, "time": 1e9 + 5, "folder": None, "world_size": 1},
    {"kind": "finished", "step": 9, "time": 1e9 + 6, "reason": None},
]  # fmt: skip
OTHER_VALUES = ["x", -1, 10**30, 1e300, 0.5, float("inf"), {}, {"a": "b"}, [], [[1]], None, True]


def runs(folder: Path) -> Iterator[str]:
    """Writes one run after the other into `folder`, and yields what is changed in it. Each value of each kind of record
    is replaced by one of each other type, or is gone; runs whose line counts as damaged are left out."""
    folder.mkdir()
    assert not _write(folder, EVERY_KIND).problems()
    for number, record in enumerate(EVERY_KIND):
        for key in record:
            without = {name: value for name, value in record.items() if name != key}
            for changed in (without, *({**record, key: other} for other in OTHER_VALUES)):
                if not _write(folder, [*EVERY_KIND[:number], changed, *EVERY_KIND[number + 1 :]]).damaged:
                    yield f"{record['kind']}: {key}: {changed.get(key)!r}"


def _write(folder: Path, records: list[dict[str, Any]]) -> metrics.Metrics:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return metrics.read(folder)
