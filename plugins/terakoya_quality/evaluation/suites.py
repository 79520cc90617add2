"""Measures a model with tasks of suites, and puts the scores into its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from terakoya.errors import UserError
from terakoya.evaluation.result import Evaluation
from terakoya.folder_kinds import kind_of
from terakoya.inference.loading import find_model
from terakoya_quality.evaluation.options import TaskOptions
from terakoya_quality.finetuning.benchmark import benchmark, watch_nothing
from terakoya_quality.finetuning.model import ModelUse
from terakoya_quality.finetuning.scores import versions, write_scores
from terakoya_quality.finetuning.settings import SHORTEST
from terakoya_quality.finetuning.suites import is_suite_task, suggest_suites

logger = logging.getLogger("terakoya")


def measure_suites(options: TaskOptions, device: torch.device) -> Evaluation:
    """Returns the scores of the options' model on their tasks. Those of a Transformers folder are written into it, too,
    after each task, except with a `limit`.

    Raises:
        UserError: other data or tasks of lm-eval were named as well, an option does not fit, or what `benchmark`
            raises.
    """
    tasks, data = options.tasks, options.stores
    if options.stride is not None:
        raise UserError("--stride: is for perplexity; suites say themselves how long texts are cut")
    if options.length is not None and options.length < SHORTEST:
        raise UserError(f"--length {options.length}: expected {SHORTEST} or more for tasks of suites")
    others = [task for task in tasks if not is_suite_task(task)]
    if others:
        raise UserError(
            f"--tasks {','.join(others)}: not together with suites; give tasks of lm-eval in a second command"
            f"{suggest_suites(others)}"
        )
    if options.corpora or len(data) != 1:
        raise UserError(
            f"--tasks {','.join(tasks)}: expected one --data FOLDER, with the tasks' files as they are published, and "
            "no --corpus"
        )
    settings = {"limit": options.limit, "precision": options.model_precision, **versions()}

    def keep(finetuned: Mapping[str, Any]) -> None:
        if options.limit is None:
            keep_scores(options.source, finetuned, settings)

    result = benchmark(
        options.source,
        tasks,
        data[0],
        settings={**(options.tuning or {}), **({} if options.length is None else {"max_length": options.length})},
        limit=options.limit,
        use=ModelUse(device=device, precision=options.model_precision, trust=options.trust_remote_code),
        watch=options.watch or watch_nothing,
        keep=keep,
    )
    return Evaluation(options.source, "fine-tuning", settings, finetuned=result.finetuned, skipped=result.skipped)


def keep_scores(source: Path, finetuned: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Writes scores into the folder of the model that was measured, if `source` is a Transformers model: of an ELECTRA
    with both models that of the discriminator."""
    if kind_of(source) == "Transformers model":
        folder, _ = find_model(source)
        try:
            write_scores(folder, source, finetuned, settings=settings)
        except OSError as error:
            logger.warning("%s", f"{folder}: the scores are not kept in the model's folder: {error}")
