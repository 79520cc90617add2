"""`terakoya finetune`: fine-tunes a finished model on a user's labelled examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError

PIPELINES = {
    "classification": "text-classification",
    "regression": "text-classification",
    "ner": "token-classification",
}
"""Kind of task -> the pipeline of Transformers that uses its model. Transformers 5 has none that answers questions."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `finetune`."""

    source: Annotated[Path, typer.Argument(help="A Transformers folder, a checkpoint or a run.", metavar="DIR")]
    train: Annotated[Path, typer.Option(help="The examples to learn from: jsonl, csv or tsv, also compressed.")]
    evaluation: Annotated[
        Path, typer.Option("--eval", help="The examples that choose between learning rates, epochs and seeds.")
    ]
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
    column: Annotated[
        Sequence[str],
        typer.Option(metavar="NAME=COLUMN", help="What the files call a column: text1=sentence1; may be repeated."),
    ] = ()
    learning_rate: Annotated[
        Sequence[float], typer.Option(help="Peak learning rate; several are tried. Default: 5e-5.")
    ] = ()
    epochs: Annotated[Sequence[int], typer.Option(help="Epochs; several are tried. Default: 3.")] = ()
    seeds: Annotated[int, typer.Option(min=1, help="Train the best setting with this many seeds.")] = 1
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a step.")] = 32
    max_length: Annotated[
        int | None,
        typer.Option(min=8, help="Tokens of an input; longer texts are cut. Default: the model's limit, at most 512."),
    ] = None
    warmup_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the steps in which the learning rate grows.")
    ] = 0.1
    weight_decay: Annotated[float, typer.Option(min=0, help="AdamW's weight decay.")] = 0.01
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only this many examples of each file, for a quick try.")
    ] = None
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the matrix products.")] = "fp32"
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False


def command(options: Options) -> None:
    """Fine-tune a finished model on labelled examples.

    The folder has the model with its head, the tokenizer, and its scores in terakoya_scores.json. The same seed gives
    the same model.
    """
    from pydantic import ValidationError
    from rich.text import Text

    from terakoya.json_settings import explain
    from terakoya.log import console
    from terakoya_quality.commands.training_scores import TuningProgress, score_table
    from terakoya_quality.finetuning.finetune import finetune_model
    from terakoya_quality.finetuning.options import FinetuneOptions
    from terakoya_quality.finetuning.settings import TuningSettings

    try:
        settings = TuningSettings(
            learning_rates=tuple(options.learning_rate or TuningSettings().learning_rates),
            epochs=tuple(options.epochs or TuningSettings().epochs), seeds=options.seeds,
            batch_size=options.batch_size, max_length=options.max_length, warmup_ratio=options.warmup_ratio,
            weight_decay=options.weight_decay,
        )  # fmt: skip
    except ValidationError as error:
        raise UserError(explain(error, TuningSettings)[0]) from None  # what follows from it comes after it
    with TuningProgress(options.task) as shown:
        result = finetune_model(
            FinetuneOptions(
                source=options.source, out=options.out, task=options.task, train=options.train,
                eval=options.evaluation, test=options.test, columns=read_columns(options.column), settings=settings,
                limit=options.limit, device=options.device, precision=options.precision,
                trust_remote_code=options.trust_remote_code, report=shown.report, progress=shown.progress,
            )
        )  # fmt: skip
    if options.as_json:
        typer.echo(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
        return
    console().print(score_table(result))
    rate, chosen_epochs = result.chosen
    console().print(
        f"learning rate {rate:g}, {chosen_epochs} epochs, best of {settings.seeds} seeds: {options.out}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if result.cut:
        counts = ", ".join(f"{name} {count:,}" for name, count in result.cut.items())
        length = result.settings.max_length
        console().print(f"longer than {length} tokens, and cut: {counts}", markup=False, soft_wrap=True)
    code = []
    if options.task in PIPELINES:
        code = [
            "from transformers import pipeline",
            f'model = pipeline("{PIPELINES[options.task]}", model="{options.out}")',
        ]
    elif options.task == "qa":
        name = "AutoModelForQuestionAnswering"
        code = [f"from transformers import {name}", f'model = {name}.from_pretrained("{options.out}")']
    for line in code:
        console().print(Text(f"  {line}"), soft_wrap=True)
    next_command.show(*next_command.upload_words(options.out))


def read_columns(given: Sequence[str]) -> dict[str, str]:
    """Returns NAME=COLUMN entries as a mapping. Raises UserError for another form."""
    columns = {}
    for each in given:
        name, equals, column = each.partition("=")
        if not (name and equals and column):
            raise UserError(f"--column {each}: expected NAME=COLUMN, for example text1=sentence1")
        columns[name] = column
    return columns
