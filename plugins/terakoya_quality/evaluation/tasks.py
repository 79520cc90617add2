"""`terakoya.evaluate` with `tasks`: chooses the program that measures these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.places import as_fields
from terakoya_evaluation.evaluate import Program, evaluate_model, run_program
from terakoya_evaluation.result import Evaluation
from terakoya_quality.evaluation.options import TaskOptions

if TYPE_CHECKING:
    import torch


def evaluate_tasks(source: Path | str, **options: Any) -> Evaluation:
    """Evaluates as `terakoya.evaluate` with `tasks`; `options` are the other fields of `TaskOptions`."""
    return measure(TaskOptions(**as_fields(TaskOptions, {"source": source, **options})))


def measure(options: TaskOptions) -> Evaluation:
    """Measures what `options` ask, as `evaluate_tasks`."""
    from terakoya_quality.evaluation.embedding import is_embedding_task, measure_embedding
    from terakoya_quality.evaluation.suites import measure_suites
    from terakoya_quality.finetuning.suites import is_suite_task

    programs: list[Program[TaskOptions]] = [
        Program(lambda options: any(map(is_embedding_task, options.tasks)), measure_embedding),
        Program(lambda options: any(map(is_suite_task, options.tasks)), measure_suites),
        Program(lambda options: True, _measure_with_harness),
    ]
    return run_program(programs, options)


def _measure_with_harness(options: TaskOptions, device: torch.device) -> Evaluation:
    from terakoya_quality.evaluation import harness

    if options.tuning:
        raise UserError(f"{next(iter(options.tuned))}: is for --tasks of a suite, such as jglue")
    checkpoint = options.checkpoint()
    if options.measure == "objective":
        raise UserError("--measure objective: needs token stores; prepare the corpus, or leave out --measure")
    if not options.tasks:
        return evaluate_model(options)
    if not options.has_texts and options.windows:
        raise UserError(
            f"{next(iter(options.windows))}: is not for tasks of lm-eval, which cut their texts themselves; "
            "leave it out"
        )
    harness.check_installed(options.tasks)
    settings = {"limit": options.limit, "precision": options.model_precision}
    evaluation = Evaluation(checkpoint or options.source, "", settings)
    if options.has_texts:
        from terakoya_evaluation.perplexity import measure_texts

        evaluation = measure_texts(options, device)
    return replace(evaluation, tasks=harness.measure_tasks(options, checkpoint, device))
