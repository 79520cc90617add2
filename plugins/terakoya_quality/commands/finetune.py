"""`terakoya finetune`: fine-tunes a finished model on a user's labelled examples."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya_quality.finetuning.options import FinetuneOptions

PIPELINES = {
    "classification": "text-classification",
    "regression": "text-classification",
    "ner": "token-classification",
}
"""Kind of task -> the pipeline of Transformers that uses its model. Transformers 5 has none that answers questions."""


@dataclass(frozen=True, kw_only=True)
class Options(FinetuneOptions):
    """The options of `finetune`: what is trained, and how it is told."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False


def command(options: Options) -> None:
    """Fine-tune a finished model on labelled examples.

    The folder has the model with its head, the tokenizer, and its scores in terakoya_scores.json. The same seed gives
    the same model.
    """
    from rich.text import Text

    from terakoya.log import console
    from terakoya_quality.commands.training_scores import TuningProgress, score_table
    from terakoya_quality.finetuning.finetune import finetune_model

    with TuningProgress(options.task) as shown:
        result = finetune_model(replace(options, report=shown.report, progress=shown.progress))
    if options.as_json:
        typer.echo(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
        return
    console().print(score_table(result))
    rate, chosen_epochs = result.chosen
    console().print(
        f"learning rate {rate:g}, {chosen_epochs} epochs, best of {options.seeds} seeds: {options.out}",
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
