"""The options of `terakoya finetune`, filled in by the command line or by `terakoya.finetune`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from terakoya.errors import UserError

if TYPE_CHECKING:
    import typer

    from terakoya_quality.finetuning.search import TrainedOnce
    from terakoya_quality.finetuning.settings import TuningSettings


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Which model learns which task from which examples, and how. What the help of an option says is not repeated here.

    Attributes:
        columns: pairs, or a mapping: the name that a task has for a column, and the files' own.
        stride: as of `TuningSettings`.
        report: receives each training when it is done.
        progress: receives the steps done and the steps of a training.
    """

    source: Annotated[Path, typer.Argument(help="A Transformers folder, a checkpoint or a run.", metavar="DIR")]
    train: Annotated[Path, typer.Option(help="The examples to learn from: jsonl, csv or tsv, also compressed.")]
    eval: Annotated[Path, typer.Option(help="The examples that choose between learning rates, epochs and seeds.")]
    task: Annotated[
        Literal["classification", "regression", "choice", "ner", "qa"],
        typer.Option(
            help="classification: text (or text1, text2), label. regression: the same, label a number. choice: "
            "question, choices, label. ner: tokens, tags; or text, spans. qa: question, context, answers."
        ),
    ]
    out: Annotated[Path, typer.Option(help="The new folder, for the model with its head.")]
    test: Annotated[
        Path | None, typer.Option(help="Examples to score as well, by which nothing is chosen.", show_default=False)
    ] = None
    columns: Annotated[
        Sequence[tuple[str, str]],
        typer.Option(
            "--column",
            metavar="NAME=COLUMN",
            help="What the files call a column: text1=sentence1; may be repeated.",
            parser=read_column,
        ),
    ] = ()
    learning_rates: Annotated[
        Sequence[float],
        typer.Option(
            "--learning-rate",
            help="Peak learning rate; several are tried. Default: 5e-5 for 110 M parameters, more for fewer.",
        ),
    ] = ()
    epochs: Annotated[
        Sequence[int],
        typer.Option(help="Epochs; several are tried. Default: 3, and up to 20 for less than 500 steps."),
    ] = ()
    seeds: Annotated[int, typer.Option(min=1, help="Train the best setting with this many seeds.")] = 1
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a step.")] = 32
    max_length: Annotated[
        int | None,
        typer.Option(min=8, help="Tokens of an input; longer texts are cut. Default: the model's limit, at most 512."),
    ] = None
    warmup_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the steps in which the learning rate grows.")
    ] = 0.1
    weight_decay: Annotated[float, typer.Option(min=0, help="Weight decay, of matrices alone.")] = 0.01
    optimizer: Annotated[
        str | Mapping[str, Any] | None,
        typer.Option(
            parser=str,
            metavar="NAME",
            help="An optimizer, or as JSON its type and settings. Default: adamw; but for ner, and without a rate, "
            "below 10 M muon.",
        ),
    ] = None
    schedule: Annotated[
        str | Mapping[str, Any] | None,
        typer.Option(
            parser=str, metavar="NAME", help="A schedule in the same way. Default: linear, up from 0 and down to 0."
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only this many examples of each file, for a quick try.")
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="Of the matrix products. Default: bf16 on a device that is fast with it, else fp32."),
    ] = None
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False
    stride: int = 128
    report: Callable[[TrainedOnce], None] = lambda trained: None
    progress: Callable[[int, int], None] = lambda done, total: None

    @property
    def settings(self) -> TuningSettings:
        """What is tried, and how. Raises UserError for a wrong value."""
        from pydantic import ValidationError

        from terakoya.json_settings import explain
        from terakoya_quality.finetuning.settings import TuningSettings

        given = {name: getattr(self, name) for name in TuningSettings.model_fields}
        given |= {name: given[name] or None for name in ("learning_rates", "epochs")}
        try:
            return TuningSettings(**given)
        except ValidationError as error:
            raise UserError(explain(error, TuningSettings)[0]) from None  # what follows from it comes after it


def read_column(text: str) -> tuple[str, str]:
    """Returns NAME=COLUMN as a pair. Raises UserError for another form."""
    name, _, column = text.partition("=")
    if not (name and column):
        raise UserError(f"--column {text}: expected NAME=COLUMN, for example text1=sentence1")
    return name, column
