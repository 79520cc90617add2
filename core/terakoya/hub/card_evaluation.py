"""Describes how good a model is, for the metadata of its card (`model-index`) and as a table in its text.

The results are those of the run's last validation before the checkpoint, and of files that `terakoya evaluate --out`
wrote. The Hub defines the metadata (https://huggingface.co/docs/hub/model-cards#evaluation-results).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.json_settings import read_json
from terakoya.log import plural
from terakoya.runs import metrics
from terakoya.runs.metrics import Metrics
from terakoya.toolkit.formats.model_files import SCORES

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TASK_NAMES = {
    "fill-mask": "Masked language modelling",
    "text-generation": "Text generation",
    "text2text-generation": "Text generation from a text",
    "token-classification": "Detection of replaced tokens",
}
"""The Hub's name of a task -> what a reader calls it."""

MEANINGS = {
    "loss": "loss",
    "mlm_loss": "loss of masked tokens",
    "masked_accuracy": "accuracy on masked tokens",
    "nsp_loss": "loss of next-sentence prediction",
    "nsp_accuracy": "accuracy of next-sentence prediction",
    "lm_loss": "loss per token",
    "token_accuracy": "accuracy of the next token",
    "perplexity": "perplexity per token",
    "bits_per_character": "bits per character",
    "bits_per_byte": "bits per byte",
    "masked_bits_per_character": "bits of masked tokens per character",
    "masked_bits_per_byte": "bits of masked tokens per byte",
    "masked_perplexity": "perplexity of masked tokens",
    "span_loss": "loss per target token",
    "target_accuracy": "accuracy on target tokens",
}
"""Name of a metric -> its meaning; others are written with spaces for underscores."""

_MASKED_LOSSES = ("mlm_loss", "generator_loss")
_COUNTS = frozenset(
    {"documents", "lines", "pieces", "rows", "tokens", "masked", "targets", "characters", "bytes", "seconds"}
)


@dataclass(frozen=True)
class CardResult:
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


def read_validation(written: Metrics) -> list[CardResult]:
    """Returns the results of the last validation on each store; `written` ends at the checkpoint."""
    last: dict[str, Mapping[str, Any]] = {}
    for record in written.of_kind("validation"):
        last[str(record.get("store") or "validation")] = record
    names = metrics.store_names(last)
    results = []
    for store, record in last.items():
        values = _finite({name: value for name, value in record.items() if name not in metrics.NON_METRIC_KEYS})
        for loss in _MASKED_LOSSES:
            if loss in values and "perplexity" not in values and values[loss] < 700:
                values["masked_perplexity"] = math.exp(values[loss])
        step = int(record["step"])
        results.append(
            CardResult(
                "/".join(PurePath(names[store]).parts[-2:]), f"validation at step {step:,}", values, {"step": step}
            )
        )
    return [each for each in results if each.values]


def read_evaluation(file: Path) -> list[CardResult]:
    """Returns the results in a file of `terakoya evaluate --out` (or `--json`).

    Raises:
        UserError: the file is not one.
    """
    content = read_json(file)
    if not isinstance(content.get("results"), list) or not isinstance(content.get("tasks"), dict):
        raise UserError(f"{file}: expected the file that `terakoya evaluate MODEL ... --out FILE` wrote")
    settings = {name: value for name, value in content.get("settings", {}).items() if value is not None}
    measure = str(content.get("measure") or "lm-eval")
    results = [
        CardResult(PurePath(str(each["data"])).name, f"terakoya evaluate, {measure}", _finite(each), settings)
        for each in content["results"]
    ]
    results += [
        CardResult(str(task), "lm-eval", _finite(numbers), settings) for task, numbers in content["tasks"].items()
    ]
    results += [_read_finetuned(name, result) for name, result in content.get("finetuned", {}).items()]
    return [each for each in results if each.values]


def read_kept(folder: Path) -> list[CardResult]:
    """Returns the results that `finetune` or `evaluate --tasks` left in the folder of a model."""
    file = folder / SCORES
    return read_evaluation(file) if file.is_file() else []


def _read_finetuned(name: str, result: Mapping[str, Any]) -> CardResult:
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
    return CardResult(str(result.get("title", name)), origin, _finite(means), settings, _finite(intervals))


def to_metadata(results: Sequence[CardResult], *, task: str) -> list[EvalResult]:
    """Returns `results` as huggingface_hub's entries of a model index, for a model of the Hub's `task`."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type=task,
            task_name=TASK_NAMES.get(task),
            dataset_name=each.data,
            dataset_type=each.data,
            metric_type=_metric_type(name),
            metric_name=f"{meaning(name)} ({each.origin})",
            metric_value=round(value, 6),
            metric_args=dict(each.settings) | _interval_args(each.intervals.get(name)) or None,
        )
        for each in results
        for name, value in each.values.items()
    ]


def table(results: Sequence[CardResult]) -> str:
    """Returns the section of the card that shows `results`; "" if there are none."""
    if not results:
        return ""
    lines = ["## Evaluation", "", "| data | measured | metric | value |", "|---|---|---|---:|"]
    for each in results:
        lines += [
            f"| {_cell(each.data)} | {each.origin} | {meaning(name)} | {_number(value, each.intervals.get(name))} |"
            for name, value in each.values.items()
        ]
    settings = {json.dumps(dict(each.settings), ensure_ascii=False): each for each in results if len(each.settings) > 1}
    for each in settings.values():
        text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in each.settings.items())
        lines += ["", f"{each.origin}: {text}."]
    return "\n".join(lines)


def meaning(name: str) -> str:
    """Returns what a reader calls the metric `name`."""
    return MEANINGS.get(name, name.replace("_", " ").replace(",", ", "))


def _metric_type(name: str) -> str:
    """Returns the Hub's kind of the metric `name`: loss, accuracy, perplexity, or the name itself."""
    return next((kind for kind in ("perplexity", "accuracy", "loss") if name.endswith(kind)), name)


def _interval_args(half: float | None) -> dict[str, float]:
    return {} if half is None else {"half_of_95_percent_interval": round(half, 6)}


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
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


def _number(value: float, half: float | None) -> str:
    """Returns the number, with half of its 95 % interval if that is known."""
    return (f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}") + ("" if half is None else f" ± {half:.4f}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
