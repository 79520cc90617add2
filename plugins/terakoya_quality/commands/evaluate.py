"""`terakoya evaluate`: measures loss and perplexity of a model, or the losses of a run's objective."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from terakoya.commands import shared_options as shared
from terakoya.commands.guidance import next_command

if TYPE_CHECKING:
    from rich.table import Table

    from terakoya_quality.evaluation.result import Evaluation

COUNTS = ("documents", "lines", "pieces", "rows", "tokens", "masked", "targets", "characters")
"""Names of the numbers that are counts; they are shown last."""
IN_JSON = ("bits_per_byte", "masked_bits_per_byte", "bytes")
"""What a table of 80 columns has no space for."""


def command(
    source: Annotated[Path, typer.Argument(help="A Transformers folder, a checkpoint or a run.", metavar="DIR")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="STORE",
            help="A token store; may be repeated. Default for a run: its validation stores. For suites: the folder of "
            "their files.",
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Raw text (jsonl, txt, parquet ...); may be repeated.")
    ] = None,
    field: shared.FieldOption = "text",
    documents: shared.DocumentsOption = "blank",
    encoding: shared.EncodingOption = None,
    measure: Annotated[
        Literal["auto", "objective", "perplexity", "pseudo-perplexity"],
        typer.Option(
            help="What to measure; auto: the measure that fits the model, and the objective for a run on stores."
        ),
    ] = "auto",
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of documents, lines or rows of each data set; pseudo-perplexity: by default 100.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that the model sees at once; default: a run's longest rows, else the model's limit, at most "
            "2048; for suites, theirs.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window over a long document to the next; default: half of --length."),
    ] = None,
    start_token: Annotated[
        bool,
        typer.Option(
            help="Begin documents with BOS (or EOS if there is no BOS), so that the first token is scored too."
        ),
    ] = True,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Positions computed at once; fewer need less memory.")
    ] = 4096,
    precision: Annotated[
        Literal["fp32", "bf16"] | None, typer.Option(help="Default: fp32; for the objective, the run's own.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Suites (jglue, glue), their tasks (jsts, jnli, sst2, ...) or suite files, for which the model is "
            "fine-tuned; jmteb, jmteb_lite or one of their tasks (jmteb:JSTS), for which it is not; or tasks of "
            "lm-eval, if it is installed.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="For suites: the number of seeds. Default: the suite's.")
    ] = None,
    learning_rate: Annotated[
        list[float] | None, typer.Option(help="For suites: a learning rate to try; may be repeated.")
    ] = None,
    epochs: Annotated[list[int] | None, typer.Option(help="For suites: epochs to try; may be repeated.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="For suites: examples of a step.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the JSON to this file, which `upload --evaluation` takes.")
    ] = None,
) -> None:
    """Measure a model.

    Causal models: loss and perplexity of documents; long documents are read in overlapping windows. Masked models:
    pseudo-perplexity; tokens are masked one at a time. A run or checkpoint on stores: the losses of its objective.
    """
    from terakoya.atomic_files import check_writable, write_text
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.errors import UserError
    from terakoya.folder_kinds import kind_of
    from terakoya.log import error_console, translated
    from terakoya_quality.commands.training_scores import TuningProgress
    from terakoya_quality.evaluation.evaluate import evaluate_model
    from terakoya_quality.evaluation.options import EvaluateOptions

    if out is not None:
        if out.is_dir():
            raise UserError(f"--out {out}: expected a file, got a folder; give --out {out / 'evaluation.json'}")
        check_writable(out.parent)
    corpora = {file: Corpus(find_files([file]), **shared.reading(documents, field, encoding)) for file in corpus or ()}
    given = {"seeds": seeds, "learning_rates": learning_rate, "epochs": epochs, "batch_size": batch_size}
    options = EvaluateOptions(
        source=source, stores=data or (), corpora=corpora, measure=measure, limit=limit, length=length, stride=stride,
        start_token=start_token, batch_tokens=batch_tokens, precision=precision, device=device,
        tasks=[task.strip() for task in (tasks or "").split(",") if task.strip()], trust_remote_code=trust_remote_code,
        tuning={name: value for name, value in given.items() if value is not None}, watch=TuningProgress,
    )  # fmt: skip
    with error_console().status(translated("evaluating"), spinner="dots") if tasks is None else nullcontext():
        evaluation = evaluate_model(options)
    text = json.dumps(evaluation.as_json(), indent=2, ensure_ascii=False)
    if out is not None:
        write_text(out, f"{text}\n")
    if as_json:
        typer.echo(text)
        return
    _show(evaluation)
    if kind_of(source) == "Transformers model":
        is_kept = bool(evaluation.finetuned) and _are_kept(source, json.loads(text)["finetuned"])
        carried = () if out is None or is_kept else ("--evaluation", out)
        next_command.show(*next_command.upload_words(source, *carried))
    else:
        next_command.show(*next_command.export_words(source))


def _show(evaluation: Evaluation) -> None:
    """Prints the settings and the numbers of an evaluation."""
    from rich.text import Text

    from terakoya.log import console, translated
    from terakoya_quality.commands.training_scores import show_benchmark, show_embedding

    shown = {name.replace("_", " "): value for name, value in evaluation.settings.items() if value is not None}
    settings = ", ".join(f"{translated(name)} {value}" for name, value in shown.items())
    measured = f": {translated(evaluation.measure)}" if evaluation.measure else ""
    console().print(Text(f"{evaluation.model}{measured}"), soft_wrap=True)
    if settings:
        console().print(settings, markup=False, soft_wrap=True, style="dim")
    if evaluation.results:
        console().print(table(evaluation))
    if evaluation.measure == "embedding":
        show_embedding(evaluation.finetuned)
    else:
        for result in evaluation.finetuned.values():
            show_benchmark(result)
    if evaluation.tasks:
        console().print(table(replace(evaluation, results=evaluation.tasks)))


def _are_kept(source: Path, finetuned: Mapping[str, Any]) -> bool:
    """Returns whether all results are also in the folder of the model, where `upload` finds them."""
    from terakoya.inference.loading import find_model
    from terakoya_quality.finetuning.scores import read_scores

    kept = read_scores(find_model(source)[0])
    return all(kept.get(name) == each for name, each in finetuned.items())


def table(evaluation: Evaluation) -> Table:
    """A table with one row per data set or task."""
    from rich.table import Table
    from rich.text import Text

    names = dict.fromkeys(name for numbers in evaluation.results.values() for name in numbers if name not in IN_JSON)
    columns = [name for name in names if name not in COUNTS] + [name for name in names if name in COUNTS]
    grid = Table("data" if evaluation.measure else "task", box=None, header_style="bold", pad_edge=False)
    for name in columns:
        grid.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for data, numbers in evaluation.results.items():
        grid.add_row(Text(data), *(_cell(name, numbers.get(name)) for name in columns))
    return grid


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in COUNTS:
        return f"{value:,}"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"
