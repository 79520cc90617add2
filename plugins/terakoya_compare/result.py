"""What a comparison found: differences with their intervals, as a table, JSON or a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from terakoya_compare.statistics import Test

COLUMNS = ("of", "score", "A", "B", "B - A", "95 % interval", "p", "pairs", "better")


@dataclass(frozen=True)
class Difference:
    """A score of two models or recipes, and how sure their difference is.

    Attributes:
        of: the store, the task or the corpus.
        score: its name; "pairs" are what was drawn, and `method` how the interval and p were computed.
        names: what A and B are called.
        values: their scores.
        test: the difference, B - A.
        larger_is_better: whether a larger score is.
        further: other numbers, such as tokens.
    """

    of: str
    score: str
    names: tuple[str, str]
    values: tuple[float, float]
    test: Test
    pairs: str
    method: str
    larger_is_better: bool = False
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def better(self) -> str | None:
        """The name of the one that is better, if the interval leaves no doubt; else None."""
        if self.test.interval is None or self.test.interval[0] <= 0 <= self.test.interval[1]:
            return None
        return self.names[(self.test.difference > 0) == self.larger_is_better]

    def cells(self) -> list[str]:
        """Returns the cells of a table, in the order of `COLUMNS`."""
        interval, p = self.test.interval, self.test.p
        shown = "-" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"
        smallest = "-" if p is None else f"{p:.1g}" if p < 0.001 else f"{p:.3f}"
        values = [f"{value:.4f}" for value in self.values]
        return [
            self.of, self.score, *values, f"{self.test.difference:+.4f}", shown, smallest,
            f"{self.pairs}, {self.method}", self.better or "-",
        ]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Returns the difference as a JSON object; what is not finite becomes null."""
        found = {**asdict(self), **asdict(self.test), **self.further, "better": self.better}
        for name in ("test", "further", "names", "values"):
            found.pop(name)
        return _finite({"a": self.names[0], "b": self.names[1], "value_a": self.values[0],
                        "value_b": self.values[1], **found})  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """What was compared, how, and what was found.

    Attributes:
        kind: "models", "tasks" or "recipes".
        settings: what decides the numbers.
        notes: sentences about what the numbers do not say.
    """

    kind: str
    settings: Mapping[str, Any]
    differences: Sequence[Difference]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as a JSON object."""
        found = [each.as_json() for each in self.differences]
        return {"compared": self.kind, "settings": _finite(self.settings), "differences": found,
                "notes": list(self.notes)}  # fmt: skip

    def shown_settings(self) -> str:
        """Returns the settings in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items() if value is not None)

    def page(self, *, markdown: bool) -> str:
        """Returns a page with the table, in Markdown or as HTML without external resources."""
        rows = [each.cells() for each in self.differences]
        names = dict.fromkeys(each.names for each in self.differences)
        pairs = [f"A: {one}, B: {other}" for one, other in names]
        texts = [*pairs, self.shown_settings(), *self.notes]
        if len(names) > 1:
            rows = [[f"{each.names[1]}: {row[0]}", *row[1:]] for each, row in zip(self.differences, rows, strict=True)]
        if markdown:
            lines = [COLUMNS, ["---"] * len(COLUMNS), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
            table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
            return "\n\n".join(["# Comparison", *texts[: len(pairs)], table, *texts[len(pairs) :]]) + "\n"
        body = [_row("th", COLUMNS), *(_row("td", row) for row in rows)]
        paragraphs = "".join(f"<p>{escape(text)}</p>\n" for text in texts)
        return f"{_HEAD}<h1>Comparison</h1>\n{paragraphs}<table>\n{''.join(body)}</table>\n"


_HEAD = (
    '<!doctype html>\n<meta charset="utf-8"><title>Comparison</title>\n<style>body{font:15px sans-serif;max-width:70em;'
    "margin:2em auto}td,th{padding:.3em .7em;text-align:right;border-bottom:1px solid #8884}td:first-child"
    "{text-align:left}:root{color-scheme:light dark}</style>\n"
)


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
