"""What `finetune` and `evaluate --tasks` show of trainings: how far they are, and tables of scores."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from terakoya.log import console, error_console, translated

if TYPE_CHECKING:
    from rich.table import Table

    from terakoya_quality.finetuning.search import SearchResult, TrainedOnce

SECONDS_BETWEEN = 30.0
"""The time between two lines about a training where standard error is not a terminal."""


class TuningProgress:
    """Shows on standard error how far a training is, and a line for each that is done."""

    def __init__(self, name: str) -> None:
        self.name, self.console = name, error_console()
        self.status = self.console.status(f"{name}: {translated('evaluating')}", spinner="dots")
        self.shown = time.monotonic()

    def __enter__(self) -> Self:
        self.status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.status.stop()

    def progress(self, done: int, total: int) -> None:
        text = f"{self.name}: step {done:,} of {total:,}"
        if self.console.is_terminal:
            self.status.update(text)
        elif time.monotonic() - self.shown >= SECONDS_BETWEEN:
            self.shown = time.monotonic()
            self.console.print(text, markup=False, soft_wrap=True)

    def report(self, trained: TrainedOnce) -> None:
        scores = trained.scores.get("eval", {})
        found = ", ".join(f"{name} {value:.4f}" for name, value in list(scores.items())[:2]) or "the loss is not finite"
        self.console.print(
            f"{self.name}: learning rate {trained.learning_rate:g}, epochs {trained.epochs}, seed {trained.seed}: "
            f"{found} ({trained.seconds:,.0f} s)",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        self.shown = time.monotonic()


def score_table(result: SearchResult) -> Table:
    """Returns a table with a row for each set of examples and a column for each score."""
    from rich.table import Table

    names = list(result.scores["eval"])
    grid = Table("examples", box=None, header_style="bold", pad_edge=False)
    for name in names:
        grid.add_column(name.replace("_", " "), justify="right")
    grid.add_column("number", justify="right")
    grid.add_column("cut", justify="right")
    for name, scores in result.scores.items():
        cells = [_format(scores[each].mean, scores[each].interval) for each in names]
        grid.add_row(name, *cells, f"{result.examples[name]:,}", f"{result.cut.get(name, 0):,}")
    return grid


def show_benchmark(result: Mapping[str, Any]) -> None:
    """Prints the scores of a task of a suite (an entry of `Evaluation.finetuned`) with those that others have
    published for the same examples, and where they are from."""
    settings = {name: value for name in _SETTINGS if (value := result["settings"].get(name)) is not None}
    console().print(f"{result['title']} ({result['suite']}): {_words(settings)}", markup=False, soft_wrap=True)
    console().print(_benchmark_table(result))
    if result["limit"] is not None:
        text = f"of the first {result['limit']:,} examples alone: not to be compared with published scores"
        console().print(text, markup=False, soft_wrap=True, style="dim")
    sources = list(dict.fromkeys(each["source"] for each in result["published"]))
    for number, source in enumerate(sources, start=1):
        console().print(f"[{number}] {source}", markup=False, soft_wrap=True, style="dim")


def show_embedding(results: Mapping[str, Any]) -> None:
    """Prints the scores of tasks of mteb (`Evaluation.finetuned`) as one table for each benchmark."""
    from rich.table import Table

    for suite in dict.fromkeys(name.partition(":")[0] for name in results):
        chosen = {name: each for name, each in results.items() if name.partition(":")[0] == suite}
        first = next(iter(chosen.values()))
        console().print(f"{first['suite']}: {_words(first['settings'])}", markup=False, soft_wrap=True)
        grid = Table("task", "examples", "score", box=None, header_style="bold", pad_edge=False)
        grid.add_column("value", justify="right")
        grid.add_column("cut", justify="right")
        for each in chosen.values():
            task = each["title"].removeprefix(f"{first['suite']}: ")
            for part, scores in each["scores"].items():
                for score in each["shown"]:
                    cells = (_format(scores[score]["mean"], None), f"{each['cut'].get('all', 0):,}")
                    grid.add_row(task, "" if part == "eval" else part, score.replace("_", " "), *cells)
        console().print(grid)


def _words(settings: Mapping[str, Any]) -> str:
    types = {name: value["type"] if isinstance(value, Mapping) else value for name, value in settings.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in types.items())


_SETTINGS = ("optimizer", "schedule", "learning_rate", "epochs", "batch_size", "max_length", "seeds", "pooling")


def _benchmark_table(result: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    sources = list(dict.fromkeys(each["source"] for each in result["published"]))
    grid = Table("examples", "model", box=None, header_style="bold", pad_edge=False)
    for name in result["shown"]:
        grid.add_column(name.replace("_", " "), justify="right")
    for part, scores in result["scores"].items():
        own = f"{part} ({result['examples'][part]:,})"
        summaries = [scores.get(name, {}) for name in result["shown"]]  # of other than two labels there is no F1
        cells = [_format(each.get("mean"), each.get("interval")) for each in summaries]
        grid.add_row(own, translated("this model"), *cells)
        for each in (each for each in result["published"] if each["set"] == part):
            published = [_format(each["scores"].get(name), None, places=3) for name in result["shown"]]
            grid.add_row("", Text(f"{each['model']} [{sources.index(each['source']) + 1}]"), *published)
    return grid


def _format(value: float | None, interval: float | None, *, places: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:.{places}f}" + ("" if interval is None else f" ± {interval:.{places}f}")
