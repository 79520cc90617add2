"""Describes how good a model is, for the metadata of its card (`model-index`) and as a table in its text.

The results are those of the run's last validation before the checkpoint, and of files that `terakoya evaluate --out`
wrote. The Hub defines the metadata (https://huggingface.co/docs/hub/model-cards#evaluation-results).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from terakoya.runs import metrics
from terakoya.runs.metrics import Metrics
from terakoya_hub.scores import Measurement, finite

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


def read_validation(written: Metrics) -> list[Measurement]:
    """Returns the results of the last validation on each store; `written` ends at the checkpoint."""
    last: dict[str, Mapping[str, Any]] = {}
    for record in written.of_kind("validation"):
        last[str(record.get("store") or "validation")] = record
    names = metrics.store_names(last)
    results = []
    for store, record in last.items():
        values = finite({name: value for name, value in record.items() if name not in metrics.NON_METRIC_KEYS})
        for loss in _MASKED_LOSSES:
            if loss in values and "perplexity" not in values and values[loss] < 700:
                values["masked_perplexity"] = math.exp(values[loss])
        step = int(record["step"])
        results.append(
            Measurement(
                "/".join(PurePath(names[store]).parts[-2:]), f"validation at step {step:,}", values, {"step": step}
            )
        )
    return [each for each in results if each.values]


def to_metadata(results: Sequence[Measurement], *, task: str) -> list[EvalResult]:
    """Returns `results` as huggingface_hub's entries of a model index, for a model of the Hub's `task`."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type=task,
            task_name=TASK_NAMES.get(task),
            dataset_name=each.data,
            dataset_type=each.data,
            metric_type=next((kind for kind in ("perplexity", "accuracy", "loss") if name.endswith(kind)), name),
            metric_name=f"{meaning(name)} ({each.origin})",
            metric_value=round(value, 6),
            metric_args=dict(each.settings) | _interval_args(each.intervals.get(name)) or None,
        )
        for each in results
        for name, value in each.values.items()
    ]


def table(results: Sequence[Measurement]) -> str:
    """Returns the section of the card that shows `results`; "" if there are none."""
    if not results:
        return ""
    lines = ["## Evaluation", "", "| data | measured | metric | value |", "|---|---|---|---:|"]
    for each in results:
        data = each.data.replace("|", "\\|").replace("\n", " ")
        lines += [
            f"| {data} | {each.origin} | {meaning(name)} | {_number(value, each.intervals.get(name))} |"
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


def _interval_args(half: float | None) -> dict[str, float]:
    return {} if half is None else {"half_of_95_percent_interval": round(half, 6)}


def _number(value: float, half: float | None) -> str:
    return (f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}") + ("" if half is None else f" ± {half:.4f}")
