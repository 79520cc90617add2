"""Reads a run's `metrics.jsonl` into records and curves, even if the run is unfinished or the file damaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.log import plural

FILE = "metrics.jsonl"
NON_METRIC_KEYS = frozenset({"kind", "step", "time", "tokens", "store"})
"""Keys of a record that are not metrics and have no curve."""


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Phase(BaseModel):
    """A phase of a record of a start."""

    model_config = ConfigDict(strict=True)

    number: Count
    name: str
    first_step: Count
    steps: Count
    global_rows: Count
    sequence_length: Count


class _Record(BaseModel):
    """The keys of a record that its readers take as more than the value of a curve, with their types."""

    model_config = ConfigDict(strict=True)

    kind: str = ""
    step: Count | None = None
    time: Annotated[float, Field(ge=0, lt=1e11)] = 0.0
    tokens: Count | None = None
    tokens_per_second: Number | None = None
    loss: float | None = None
    store: str | None = None
    signal: str | None = None
    max_steps: Count | None = None
    max_tokens: Count | None = None
    phases: list[_Phase] | None = None
    world: dict[str, Any] = {}
    devices: dict[str, Count] | None = None
    hosts: list[Any] = []
    stores: dict[str, str] = {}
    versions: dict[str, Any] = {}
    back_to: Count | None = None
    milliseconds: list[dict[str, Any]] = []
    scored_step: Count = 0
    scores: dict[str, Any] = {}
    masks: list[list[Annotated[tuple[Any, Number], Field(strict=False)]]] | None = None


@dataclass(frozen=True)
class Metrics:
    """The records of one run in the order in which they were written.

    Attributes:
        records: one object a line; its `kind` names the event it records.
        unfinished: whether the last line is truncated because the run was killed or is writing it.
        damaged: the numbers, from 1, of other lines that are not records, or have a value of another type than such
            records have; they are skipped.
    """

    records: tuple[Mapping[str, Any], ...]
    unfinished: bool = False
    damaged: tuple[int, ...] = ()

    def problems(self) -> list[str]:
        """Returns a sentence for each problem of the file."""
        sentences = [f"line {number} of {FILE} is damaged and skipped" for number in self.damaged[:3]]
        if len(self.damaged) > len(sentences):
            more = len(self.damaged) - len(sentences)
            sentences.append(f"{more:,} more damaged line{plural(more)} of {FILE} skipped")
        return sentences + [f"the last line of {FILE} is truncated"] * self.unfinished

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Returns the records of one kind."""
        return [record for record in self.records if record.get("kind") == kind]


def read(folder: Path) -> Metrics:
    """Reads the metrics of the run in `folder`; there are no records if the run has not written any yet. Raises
    UserError unless `folder` is a run's folder."""
    file = folder / FILE
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (folder / "parameters.json").is_file() or (folder / "run.lock").is_file():
            return Metrics(())
        raise UserError(
            f"{file}: no such file; expected the folder of a run, got {describe_found(folder, 'run')}"
        ) from None
    records: list[Mapping[str, Any]] = []
    damaged, unfinished = [], False
    lines = content.rstrip(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record, unfinished = None, number == len(lines)
        try:
            _Record.model_validate(record)
            records.append(record)
        except ValidationError:
            damaged.append(number)
    return Metrics(tuple(records), unfinished, tuple(damaged[:-1] if unfinished else damaged))


class Point(NamedTuple):
    """One value of a curve, with its step and the hours and tokens trained by then."""

    step: int
    hours: float
    value: float
    tokens: int


@dataclass
class Curves:
    """A run's metrics as curves.

    Attributes:
        points: the points of each curve by name; a validation curve is called "validation STORE METRIC".
        restarts: where the run was resumed, as (step, hours).

    Hours count the time spent training: the pause between a stop and the resume is excluded.
    """

    points: dict[str, list[Point]] = field(default_factory=dict)
    restarts: list[tuple[int, float]] = field(default_factory=list)

    def of_metric(self, metric: str) -> dict[str, list[Point]]:
        """Returns the curves of one metric: of training and of every validation."""
        return {name: points for name, points in self.points.items() if name.split()[-1] == metric}

    def metric_names(self) -> list[str]:
        """Returns the metrics that have curves, in the order of their first record."""
        return list(dict.fromkeys(name.split()[-1] for name in self.points))


def curves(metrics: Metrics, names: Collection[str] | None = None) -> Curves:
    """Returns the curves of the metrics `names`, or of all. Of a step that a resumed run repeated, the last record
    counts."""
    result = Curves()
    stores = store_names(str(record["store"]) for record in metrics.of_kind("validation") if record.get("store"))
    tokens_at, hours_at = {0: 0}, {0: 0.0}  # tokens and hours trained, by logged step
    trained, hours = 0, 0.0  # the most of both; a run may have 100,000 logged steps
    for record in metrics.records:
        kind, step = record.get("kind"), int(record.get("step") or 0)
        if kind == "fork":
            trained, hours = int(record.get("tokens") or 0), 0.0
            tokens_at, hours_at = {step: trained}, {step: hours}
        elif kind == "resume":
            for name, points in result.points.items():
                result.points[name] = [point for point in points if point.step <= step]
            result.restarts = [restart for restart in result.restarts if restart[0] <= step]
            tokens_at = {logged: tokens for logged, tokens in tokens_at.items() if logged <= step}
            hours_at = {logged: value for logged, value in hours_at.items() if logged <= step}
            trained, hours = max(tokens_at.values(), default=0), max(hours_at.values(), default=0.0)
            result.restarts.append((step, hours))
        elif kind == "step":
            rate, tokens = record.get("tokens_per_second"), record.get("tokens")
            if rate and tokens is not None:
                hours += (tokens - trained) / rate / 3600
                trained = max(trained, tokens)
                tokens_at[step], hours_at[step] = tokens, hours
            _add(result, record, step, hours, trained, names, prefix="")
        elif kind == "validation":
            store = record.get("store")
            prefix = f"validation {stores[store]} " if store else "validation "
            _add(result, record, step, hours, trained, names, prefix=prefix)
    return result


def _add(
    result: Curves,
    record: Mapping[str, Any],
    step: int,
    hours: float,
    tokens: int,
    names: Collection[str] | None,
    *,
    prefix: str,
) -> None:
    for name, value in record.items():
        wanted = name not in NON_METRIC_KEYS if names is None else name in names
        if wanted and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            point = Point(step, hours, float(value), int(record.get("tokens") or tokens))
            result.points.setdefault(prefix + name, []).append(point)


def store_names(stores: Iterable[str]) -> dict[str, str]:
    """Returns a short name for each path of `stores`: its folder's name, or the whole path if two names are equal."""
    paths = list(dict.fromkeys(stores))
    counts = Counter(Path(path).name for path in paths)
    return {path: Path(path).name if counts[Path(path).name] == 1 else path for path in paths}


def anomalies(metrics: Metrics, kind: str) -> list[Mapping[str, Any]]:
    """Returns the records of one kind of anomaly, "skipped", "spike" or "rollback", in the order of their steps: each
    once, and without those that a resumed run discarded."""
    kept: dict[tuple[int, Any], Mapping[str, Any]] = {}
    for record in metrics.records:
        step = int(record.get("step") or 0)
        if record.get("kind") == "resume":
            kept = {key: value for key, value in kept.items() if key[0] <= step}
        elif record.get("kind") == kind:
            kept[step, record.get("signal")] = record
    return [kept[key] for key in sorted(kept, key=lambda key: key[0])]


def kept_steps(metrics: Metrics) -> list[Mapping[str, Any]]:
    """Returns the records of logged steps, without those that a resumed run discarded."""
    kept: list[Mapping[str, Any]] = []
    for record in metrics.records:
        if record.get("kind") == "resume":
            kept = [step for step in kept if int(step.get("step") or 0) <= int(record.get("step") or 0)]
        elif record.get("kind") == "step":
            kept.append(record)
    return kept
