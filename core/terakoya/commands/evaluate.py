"""`terakoya evaluate`: measures loss and perplexity of a model, or the losses of a run's objective."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import reading
from terakoya.preparation.options import Documents, PrepareOptions

if TYPE_CHECKING:
    from rich.table import Table

    from terakoya.evaluation.result import Evaluation

COUNTS = ("documents", "lines", "pieces", "rows", "tokens", "masked", "targets", "characters")
"""Names of the numbers that are counts; they are shown last."""
IN_JSON = ("bits_per_byte", "masked_bits_per_byte", "bytes")
"""What a table of 80 columns has no space for."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `evaluate`."""

    source: Annotated[Path, typer.Argument(help="A Transformers folder, a checkpoint or a run.", metavar="DIR")]
    data: Annotated[
        Sequence[Path],
        typer.Option(
            metavar="STORE",
            help="A token store; may be repeated. Default for a run: its validation stores. For suites: the folder of "
            "their files.",
        ),
    ] = ()
    corpus: Annotated[
        Sequence[str], typer.Option(metavar="FILE", help="Raw text (jsonl, txt, parquet ...); may be repeated.")
    ] = ()
    field: Annotated[str, PrepareOptions] = "text"
    documents: Annotated[Documents, PrepareOptions] = "blank"
    encoding: Annotated[str | None, PrepareOptions] = None
    measure: Annotated[
        Literal["auto", "objective", "perplexity", "pseudo-perplexity"],
        typer.Option(
            help="What to measure; auto: the measure that fits the model, and the objective for a run on stores."
        ),
    ] = "auto"
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of documents, lines or rows of each data set; pseudo-perplexity: by default 100.",
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that the model sees at once; default: a run's longest rows, else the model's limit, at most "
            "2048; for suites, theirs.",
        ),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window over a long document to the next; default: half of --length."),
    ] = None
    start_token: Annotated[
        bool,
        typer.Option(
            help="Begin documents with BOS (or EOS if there is no BOS), so that the first token is scored too."
        ),
    ] = True
    batch_tokens: Annotated[int, typer.Option(min=1, help="Positions computed at once; fewer need less memory.")] = 4096
    precision: Annotated[
        Literal["fp32", "bf16"] | None, typer.Option(help="Default: fp32; for the objective, the run's own.")
    ] = None
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Suites (jglue, glue), their tasks (jsts, jnli, sst2, ...) or suite files, for which the model is "
            "fine-tuned; jmteb, jmteb_lite or one of their tasks (jmteb:JSTS), for which it is not; or tasks of "
            "lm-eval, if it is installed.",
        ),
    ] = None
    seeds: Annotated[int | None, typer.Option(min=1, help="For suites: the number of seeds. Default: the suite's.")] = (
        None
    )
    learning_rate: Annotated[
        Sequence[float], typer.Option(help="For suites: a learning rate to try; may be repeated.")
    ] = ()
    epochs: Annotated[Sequence[int], typer.Option(help="For suites: epochs to try; may be repeated.")] = ()
    batch_size: Annotated[int | None, typer.Option(min=1, help="For suites: examples of a step.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
    out: Annotated[
        Path | None, typer.Option(help="Also write the JSON to this file, which `upload --evaluation` takes.")
    ] = None


def command(options: Options) -> None:
    """Measure a model.

    Causal models: loss and perplexity of documents; long documents are read in overlapping windows. Masked models:
    pseudo-perplexity; tokens are masked one at a time. A run or checkpoint on stores: the losses of its objective.
    """
    from terakoya.atomic_files import check_writable, write_text
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.errors import UserError
    from terakoya.evaluation.evaluate import evaluate_model
    from terakoya.evaluation.options import EvaluateOptions
    from terakoya.folder_kinds import kind_of
    from terakoya.log import error_console, translated
    from terakoya_quality.commands.training_scores import TuningProgress

    out = options.out
    if out is not None:
        if out.is_dir():
            raise UserError(f"--out {out}: expected a file, got a folder; give --out {out / 'evaluation.json'}")
        check_writable(out.parent)
    tuning = {
        "seeds": options.seeds, "learning_rates": list(options.learning_rate), "epochs": list(options.epochs),
        "batch_size": options.batch_size,
    }  # fmt: skip
    measured = EvaluateOptions(
        source=options.source, stores=options.data, measure=options.measure, limit=options.limit,
        corpora={file: Corpus(find_files([file]), **reading(options)) for file in options.corpus},
        length=options.length, stride=options.stride, start_token=options.start_token,
        batch_tokens=options.batch_tokens, precision=options.precision, device=options.device,
        tasks=[task.strip() for task in (options.tasks or "").split(",") if task.strip()],
        trust_remote_code=options.trust_remote_code, watch=TuningProgress,
        tuning={name: value for name, value in tuning.items() if value},
    )  # fmt: skip
    with error_console().status(translated("evaluating"), spinner="dots") if options.tasks is None else nullcontext():
        evaluation = evaluate_model(measured)
    text = json.dumps(evaluation.as_json(), indent=2, ensure_ascii=False)
    if out is not None:
        write_text(out, f"{text}\n")
    if options.as_json:
        typer.echo(text)
        return
    _show(evaluation)
    if kind_of(options.source) == "Transformers model":
        is_kept = bool(evaluation.finetuned) and _are_kept(options.source, json.loads(text)["finetuned"])
        carried = () if out is None or is_kept else ("--evaluation", out)
        next_command.show(*next_command.upload_words(options.source, *carried))
    else:
        next_command.show(*next_command.export_words(options.source))


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
