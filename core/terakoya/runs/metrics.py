"""What a run wrote down: reading `metrics.jsonl` into records and curves, finished or not, damaged or not."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from terakoya.errors import UserError

FILE = "metrics.jsonl"
NO_CURVES = frozenset({"kind", "step", "time", "tokens", "store"})
"""Numbers of a record that are no curve."""


@dataclass(frozen=True)
class Metrics:
    """The records of one run in the order in which they were written.

    Attributes:
        records: one object each; `kind` says what of.
        unfinished: whether the last line is cut off, as a run that is killed, or is writing, leaves it.
        damaged: the numbers of other lines that are no records, from 1; they are left out.
    """

    records: tuple[Mapping[str, Any], ...]
    unfinished: bool = False
    damaged: tuple[int, ...] = ()

    def problems(self) -> list[str]:
        """What is wrong with the file, in words."""
        said = [f"line {number} of {FILE} is damaged and left out" for number in self.damaged[:3]]
        if len(self.damaged) > len(said):
            said.append(f"{len(self.damaged) - len(said):,} more lines of {FILE} are damaged and left out")
        return said + [f"the last line of {FILE} is cut off"] * self.unfinished

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """The records of one kind."""
        return [record for record in self.records if record.get("kind") == kind]


def read(folder: Path) -> Metrics:
    """The metrics of the run in `folder`; without any where the run has written none yet.

    Raises:
        UserError: `folder` is no run.
    """
    file = folder / FILE
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (folder / "parameters.json").is_file() or (folder / "run.lock").is_file():
            return Metrics(())
        raise UserError(f"{file}: no such file; expected the folder of a run") from None
    records: list[Mapping[str, Any]] = []
    damaged = []
    lines = content.rstrip(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged.append(number)
    unfinished = bool(damaged) and damaged[-1] == len(lines)
    return Metrics(tuple(records), unfinished, tuple(damaged[:-1] if unfinished else damaged))


class Point(NamedTuple):
    """One value of a curve: at which step, after how many hours of training and how many tokens."""

    step: int
    hours: float
    value: float
    tokens: int


@dataclass
class Curves:
    """What a run's metrics hold as curves.

    Attributes:
        points: the points of each curve by name; those of a validation are called "validation STORE NAME".
        restarts: where the run was resumed, as (step, hours).

    Hours count the time spent training: the pause between a stop and its resumption is left out.
    """

    points: dict[str, list[Point]] = field(default_factory=dict)
    restarts: list[tuple[int, float]] = field(default_factory=list)

    def named(self, number: str) -> dict[str, list[Point]]:
        """The curves of `number` alone: of training and of every validation."""
        return {name: points for name, points in self.points.items() if name.split()[-1] == number}

    def numbers(self) -> list[str]:
        """Which numbers there are curves of, in the order in which they came."""
        return list(dict.fromkeys(name.split()[-1] for name in self.points))


def curves(metrics: Metrics, numbers: Collection[str] | None = None) -> Curves:
    """The curves of `numbers`, or of all there are. Steps that a resumed run did again count once, as last done."""
    found = Curves()
    names = store_names(str(record["store"]) for record in metrics.of("validation") if record.get("store"))
    tokens_at, hours, written = {0: 0}, 0.0, {0: 0.0}  # tokens trained on and hours, by logged step
    for record in metrics.records:
        kind, step = record.get("kind"), int(record.get("step") or 0)
        if kind == "resume":
            _forget_after(found, step)
            tokens_at = {logged: tokens for logged, tokens in tokens_at.items() if logged <= step}
            written = {logged: value for logged, value in written.items() if logged <= step}
            hours = max(written.values())
            found.restarts.append((step, hours))
        elif kind == "step":
            rate, tokens = record.get("tokens_per_second"), record.get("tokens")
            if rate and tokens is not None:
                hours += (tokens - max(tokens_at.values())) / rate / 3600
                tokens_at[step], written[step] = tokens, hours
            _add(found, record, step, hours, max(tokens_at.values()), numbers, prefix="")
        elif kind == "validation":
            store = record.get("store")
            prefix = f"validation {names[store]} " if store else "validation "
            _add(found, record, step, hours, max(tokens_at.values()), numbers, prefix=prefix)
    return found


def _add(
    found: Curves,
    record: Mapping[str, Any],
    step: int,
    hours: float,
    tokens: int,
    numbers: Collection[str] | None,
    *,
    prefix: str,
) -> None:
    for name, value in record.items():
        wanted = name not in NO_CURVES if numbers is None else name in numbers
        if wanted and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            point = Point(step, hours, float(value), int(record.get("tokens") or tokens))
            found.points.setdefault(prefix + name, []).append(point)


def _forget_after(found: Curves, step: int) -> None:
    """Drops the points after `step`."""
    for name, points in found.points.items():
        found.points[name] = [point for point in points if point.step <= step]
    found.restarts = [restart for restart in found.restarts if restart[0] <= step]


def store_names(stores: Iterable[str]) -> dict[str, str]:
    """What each of the paths `stores` is called: its folder's name, or the path where two have the same."""
    paths = list(dict.fromkeys(stores))
    often = Counter(Path(path).name for path in paths)
    return {path: Path(path).name if often[Path(path).name] == 1 else path for path in paths}


def kept_steps(metrics: Metrics) -> list[Mapping[str, Any]]:
    """The records of logged steps, without those that a resumed run threw away."""
    kept: list[Mapping[str, Any]] = []
    for record in metrics.records:
        if record.get("kind") == "resume":
            kept = [each for each in kept if int(each.get("step") or 0) <= int(record.get("step") or 0)]
        elif record.get("kind") == "step":
            kept.append(record)
    return kept
