"""What an evaluation found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Numbers = Mapping[str, float]
"""Numbers of one data set or task, by name."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        model: the folder that was evaluated; for a run, its checkpoint.
        measure: `objective`, `perplexity`, `pseudo-perplexity`, `fine-tuning` or `embedding`; "" if only tasks of
            lm-eval were run.
        settings: the other settings that decide the numbers.
        results: data set -> its numbers.
        tasks: task of lm-eval -> its numbers.
        finetuned: task of a suite or of mteb -> its result, see `terakoya_quality/evaluation`.
        skipped: task of a suite or of mteb -> why it was not done.
    """

    model: Path
    measure: str
    settings: Mapping[str, Any]
    results: Mapping[str, Numbers] = field(default_factory=dict)
    tasks: Mapping[str, Numbers] = field(default_factory=dict)
    finetuned: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the evaluation as a JSON object; infinity and NaN, which JSON does not have, become null."""

        def finite(numbers: Numbers) -> dict[str, float | None]:
            return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

        return {
            "model": str(self.model),
            "measure": self.measure,
            "settings": dict(self.settings),
            "results": [{"data": name, **finite(numbers)} for name, numbers in self.results.items()],
            "tasks": {name: finite(numbers) for name, numbers in self.tasks.items()},
            **({"finetuned": dict(self.finetuned), "skipped": dict(self.skipped)} if self.finetuned else {}),
        }
