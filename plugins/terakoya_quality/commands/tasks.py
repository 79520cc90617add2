"""`terakoya evaluate --tasks`: a model is measured by tasks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from terakoya_evaluation.result import Evaluation


def evaluate(
    verb: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
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
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="For suites: an optimizer, or as JSON its type and settings.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="For suites: a schedule, in the same way.")
    ] = None,
) -> None:
    """Measures the model by the tasks, if there are any."""
    given = {
        "seeds": seeds, "learning_rates": learning_rate, "epochs": epochs, "batch_size": batch_size,
        "optimizer": optimizer, "schedule": schedule,
    }  # fmt: skip
    tuning = {name: value for name, value in given.items() if value}
    if tasks is None and not tuning:
        verb(**arguments)
        return
    from terakoya_evaluation.commands.evaluate import check_out, show
    from terakoya_quality.commands.training_scores import TuningProgress, show_benchmark, show_embedding
    from terakoya_quality.evaluation.options import EvaluateOptions, TaskOptions
    from terakoya_quality.evaluation.tasks import measure

    options = arguments["options"]
    check_out(options)
    own = {field.name: getattr(options, field.name) for field in dataclasses.fields(EvaluateOptions)}
    names = [task.strip() for task in (tasks or "").split(",") if task.strip()]
    evaluation = measure(TaskOptions(**own, tasks=names, tuning=tuning, watch=TuningProgress))

    def show_scores() -> None:
        if evaluation.measure == "embedding":
            show_embedding(evaluation.finetuned)
        else:
            for result in evaluation.finetuned.values():
                show_benchmark(result)

    show(options, evaluation, more=show_scores, is_kept=_are_kept(options.source, evaluation))


def _are_kept(source: Path, evaluation: Evaluation) -> bool:
    """Returns whether all results of a Transformers model are also in its folder, where `upload` finds them."""
    from terakoya.folder_kinds import kind_of
    from terakoya.inference.loading import find_model
    from terakoya_quality.finetuning.scores import read_scores

    finetuned = evaluation.as_json().get("finetuned")
    if not finetuned or kind_of(source) != "Transformers model":
        return False
    kept = read_scores(find_model(source)[0])
    return all(kept.get(name) == each for name, each in json.loads(json.dumps(finetuned)).items())
