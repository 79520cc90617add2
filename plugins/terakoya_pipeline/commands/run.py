"""`terakoya run`: tokenizer, stores, training and export from one pipeline JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.log import announce, console, error_console, translated

if TYPE_CHECKING:
    from terakoya_pipeline.run import Pipeline
    from terakoya_pipeline.stages import StageResult


def run(pipeline: Pipeline, *, redo: bool = False, trains: bool = True) -> list[StageResult]:
    """Runs every stage of `pipeline` that is not done yet, without `trains` those before the training, and prints the
    result of each. Raises UserError as `terakoya_pipeline.run.run_pipeline` does."""
    from terakoya_pipeline.run import run_pipeline

    results = []
    for result in run_pipeline(pipeline, redo=redo, trains=trains):
        console().print(_line(result), markup=False, soft_wrap=True)
        results.append(result)
    return results


def _line(result: StageResult) -> str:
    facts = ", ".join(
        f"{translated(name.replace('_', ' '))} {value:,}"
        for name, value in result.facts.items()
        if isinstance(value, int) and not isinstance(value, bool) and (value or name != "count_error")
    )
    outcome = f"{result.out} is already made from the same settings"
    if not result.skipped:
        outcome = f"{result.out} was made in {result.seconds:.1f} s"
    return f"{translated(result.name)}: {translated(outcome)}" + (f" ({facts})" if facts else "")


def command(
    pipeline: Annotated[Path, typer.Argument(help="The pipeline JSON.", metavar="PIPELINE.json")],
    redo: Annotated[
        bool, typer.Option("--redo", help="Move outputs made from other settings aside and make them again.")
    ] = False,
    train: Annotated[
        bool,
        typer.Option(
            "--train/--no-train", help="Train and export, or stop when the stores are made, to train elsewhere."
        ),
    ] = True,
) -> None:
    """Go from raw text to a model that Transformers loads; the same command continues an interrupted pipeline."""
    announce(f"terakoya run: reads {pipeline} ...")
    from terakoya_pipeline.run import parameters_file, read_pipeline

    settings = read_pipeline(pipeline)
    results = run(settings, redo=redo, trains=train)
    if not train:
        next_command.show("train", parameters_file(settings), "--out", settings.run)
        return
    if all(result.skipped for result in results):
        error_console().print(_say_finished(settings), markup=False, soft_wrap=True)
    next_command.after_model(settings.export)


def _say_finished(settings: Pipeline) -> str:
    """Returns that all stages are finished, and how the training continues."""
    from terakoya.config.fields import LENGTH_KEYS
    from terakoya.runs.files import read_parameters

    parameters = read_parameters(settings.run)
    key = next((name for name in LENGTH_KEYS if parameters.get(name) is not None), LENGTH_KEYS[0])
    return (
        f"everything is made already, and the run is finished; a larger value of {key} in the parameters, with another "
        'folder as "export", continues it'
    )
