"""Evaluates a finished model or a run: chooses the program that measures what was asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.evaluation.options import EvaluateOptions
from terakoya.evaluation.result import Evaluation
from terakoya.folder_kinds import describe_found
from terakoya.runs.finding import find_checkpoint, names_checkpoint


def evaluate(source: Path, **options: Any) -> Evaluation:
    """Evaluates the model in `source`: a Transformers folder, a checkpoint, a run (its newest whole checkpoint), or
    RUN@STEP. `options` are the other fields of `EvaluateOptions`.

    Raises:
        UserError: the arguments, the model or the data do not fit together.
    """
    return evaluate_model(EvaluateOptions(source=source, **options))


def evaluate_model(options: EvaluateOptions) -> Evaluation:
    """Measures what `options` ask, as `evaluate`."""
    from terakoya.evaluation.objective import measure_objective
    from terakoya.evaluation.perplexity import measure_texts
    from terakoya.inference.loading import find_device
    from terakoya.inference.padded_attention import use_safe_attention
    from terakoya_quality.evaluation import harness
    from terakoya_quality.evaluation.embedding import is_embedding_task, measure_embedding
    from terakoya_quality.evaluation.suites import measure_suites
    from terakoya_quality.finetuning.suites import is_suite_task

    use_safe_attention()  # also for the models of checkpoints and of lm-eval, which no loader here loads
    device = find_device(options.device, precision=options.model_precision)
    if device.type == "mps":
        raise UserError(
            f"--device {options.device}: losses are added up in float64, which Apple's GPU (MPS) does not have; "
            "use --device cpu"
        )
    if any(is_embedding_task(task) for task in options.tasks):
        return measure_embedding(options, device)
    if any(is_suite_task(task) for task in options.tasks):
        return measure_suites(options, device)
    if options.tuning:
        raise UserError(f"{next(iter(options.tuned))}: is for --tasks of a suite, such as jglue")
    checkpoint = find_checkpoint(options.source) if names_checkpoint(options.source) else None
    if checkpoint is None and not options.source.exists():
        there = describe_found(options.source, "Transformers model")
        raise UserError(f"{options.source}: expected a Transformers folder, a checkpoint or a run, got {there}")
    on_stores = not options.corpora and not options.tasks
    if options.measure == "objective" or (options.measure == "auto" and checkpoint is not None and on_stores):
        return measure_objective(options, checkpoint, device)
    has_texts = bool(options.stores or options.corpora)
    if not has_texts and not options.tasks:
        raise UserError("nothing to evaluate on: name --data STORE, --corpus FILE or --tasks NAME")
    if not has_texts and options.windows:
        raise UserError(
            f"{next(iter(options.windows))}: is not for tasks of lm-eval, which cut their texts themselves; "
            "leave it out"
        )
    if options.tasks:
        harness.check_installed(options.tasks)
    settings = {"limit": options.limit, "precision": options.model_precision}
    evaluation = Evaluation(checkpoint or options.source, "", settings)
    if has_texts:
        evaluation = measure_texts(options, checkpoint, device)
    if options.tasks:
        evaluation = replace(evaluation, tasks=harness.measure_tasks(options, checkpoint, device))
    return evaluation
