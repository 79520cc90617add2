"""`terakoya evaluate`: loss and perplexity of a model, or a run's own losses, on texts and stores."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from terakoya.evaluation.evaluate import Evaluation

COUNTS = ("documents", "lines", "pieces", "rows", "tokens", "masked", "targets", "bytes")
"""Numbers that are counts, shown last."""


def command(
    source: Annotated[Path, typer.Argument(help="A Transformers folder, a checkpoint or a run.", metavar="DIR")],
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="STORE", help="A token store; may be repeated. Default for a run: what it validates on."),
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Raw text (jsonl, txt, parquet ...); may be repeated.")
    ] = None,
    field: Annotated[str, typer.Option(help="Of --corpus: where the text stands in jsonl, csv and parquet.")] = "text",
    documents: Annotated[
        Literal["blank", "line"], typer.Option(help="Of --corpus: how documents are separated in txt.")
    ] = "blank",
    measure: Annotated[
        Literal["auto", "objective", "perplexity", "pseudo-perplexity"],
        typer.Option(help="What to measure; auto: what fits the model, for a run on stores its objective."),
    ] = "auto",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many documents, lines or rows of each; pseudo-perplexity: 100 lines."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens that the model sees at once; default: its own length, at most 2048."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window over a long document to the next; default: half of --length."),
    ] = None,
    start_token: Annotated[
        bool, typer.Option(help="Begin documents with BOS, or EOS where there is none, so that token 1 is scored too.")
    ] = True,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Positions computed at once; fewer need less memory.")
    ] = 4096,
    precision: Annotated[
        Literal["fp32", "bf16"] | None, typer.Option(help="Default: fp32; by the objective, the run's own.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Tasks of lm-eval, where that is installed.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model of its own kind brings.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure a model.

    Causal models: loss and perplexity of documents, long ones in windows that overlap. Masked models:
    pseudo-perplexity, each token masked in its turn. A run or checkpoint on stores: its objective's own losses.
    """
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.evaluation.evaluate import evaluate
    from terakoya.log import console, error_console

    corpora = {each: Corpus(find_files([each]), field=field, documents=documents) for each in corpus or ()}
    with error_console().status("evaluating", spinner="dots"):
        found = evaluate(
            source, stores=data or (), corpora=corpora, measure=measure, limit=limit, length=length, stride=stride,
            start_token=start_token, batch_tokens=batch_tokens, precision=precision, device=device,
            tasks=[task.strip() for task in (tasks or "").split(",") if task.strip()],
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(as_object(found), indent=2, ensure_ascii=False))
        return
    shown = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in found.settings.items() if value is not None
    )
    console().print(f"{found.model}{f': {found.measure}' if found.measure else ''}", markup=False, soft_wrap=True)
    if shown:
        console().print(shown, markup=False, soft_wrap=True, style="dim")
    if found.results:
        console().print(table(found))
    if found.tasks:
        console().print(table(replace(found, results=found.tasks)))


def as_object(found: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON has it; numbers that JSON has not become null."""

    def clean(numbers: dict[str, float]) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

    return {
        "model": str(found.model),
        "measure": found.measure,
        "settings": dict(found.settings),
        "results": [{"data": name, **clean(dict(numbers))} for name, numbers in found.results.items()],
        "tasks": {name: clean(dict(numbers)) for name, numbers in found.tasks.items()},
    }


def table(found: Evaluation) -> Table:
    """One data set, or task, a row."""
    from rich.table import Table
    from rich.text import Text

    names = dict.fromkeys(name for numbers in found.results.values() for name in numbers)
    columns = [name for name in names if name not in COUNTS] + [name for name in names if name in COUNTS]
    grid = Table("data" if found.measure else "task", box=None, header_style="bold", pad_edge=False)
    for name in columns:
        grid.add_column(name.replace("_", " "), justify="right")
    for data, numbers in found.results.items():
        grid.add_row(Text(data), *(_cell(name, numbers.get(name)) for name in columns))
    return grid


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in COUNTS:
        return f"{value:,}"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"
