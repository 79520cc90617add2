"""What was measured of a finished model, as the files say that `terakoya evaluate --out` and `finetune` write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from terakoya.errors import UserError
from terakoya.json_settings import read_json
from terakoya.log import plural
from terakoya.toolkit.formats.model_files import SCORES

_COUNTS = frozenset(
    {"documents", "lines", "pieces", "rows", "tokens", "masked", "targets", "characters", "bytes", "seconds"}
)


@dataclass(frozen=True)
class Measurement:
    """The numbers of one measurement on one data set.

    Attributes:
        data: the data set as a reader knows it: a store's or a file's name without its folder, or a task of lm-eval.
        origin: what was measured and how: `validation at step 2,000`.
        values: name -> number, finite ones alone.
        settings: what else decides the numbers.
        intervals: name -> half the width of the 95 % interval of a mean.
    """

    data: str
    origin: str
    values: Mapping[str, float]
    settings: Mapping[str, Any]
    intervals: Mapping[str, float] = field(default_factory=dict)


def read_evaluation(file: Path) -> list[Measurement]:
    """Returns the results in a file of `terakoya evaluate --out` (or `--json`). Raises UserError if the file is not
    one."""
    content = read_json(file)
    if not isinstance(content.get("results"), list) or not isinstance(content.get("tasks"), dict):
        raise UserError(f"{file}: expected the file that `terakoya evaluate MODEL ... --out FILE` wrote")
    settings = {name: value for name, value in content.get("settings", {}).items() if value is not None}
    measure = str(content.get("measure") or "lm-eval")
    results = [
        Measurement(PurePath(str(each["data"])).name, f"terakoya evaluate, {measure}", finite(each), settings)
        for each in content["results"]
    ]
    results += [
        Measurement(str(task), "lm-eval", finite(numbers), settings) for task, numbers in content["tasks"].items()
    ]
    results += [_read_finetuned(name, result) for name, result in content.get("finetuned", {}).items()]
    return [each for each in results if each.values]


def read_kept(folder: Path) -> list[Measurement]:
    """Returns the results that `finetune` or `evaluate --tasks` left in the folder of a model."""
    file = folder / SCORES
    return read_evaluation(file) if file.is_file() else []


def _read_finetuned(name: str, result: Mapping[str, Any]) -> Measurement:
    """Returns the means over the seeds of a task that the model was fine-tuned for. The scores of other examples than
    those that chose the settings have their name before them. A `limit` of examples is told with each score."""
    found = {
        score if part == "eval" else f"{part} {score}": summary
        for part, scores in result["scores"].items()
        for score, summary in scores.items()
        if score in result.get("shown", scores)
    }
    settings = {key: value for key, value in result["settings"].items() if value is not None}
    seeds = settings.get("seeds")
    trained = "without training" if seeds is None else f"fine-tuned, mean of {seeds} seed{plural(seeds)}"
    origin = str(result.get("origin", trained))
    if (limit := result.get("limit")) is not None:
        settings["limit"] = limit
        origin += f", of the first {limit:,} examples alone"
    means, intervals = ({score: each[part] for score, each in found.items()} for part in ("mean", "interval"))
    return Measurement(str(result.get("title", name)), origin, finite(means), settings, finite(intervals))


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of `values`, without counts; `loss` goes where another name has the same value."""
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _COUNTS
        and math.isfinite(value)
    }  # fmt: skip
    if any(name != "loss" and value == numbers.get("loss") for name, value in numbers.items()):
        del numbers["loss"]
    return numbers
