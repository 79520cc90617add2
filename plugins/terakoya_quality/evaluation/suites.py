"""Measures a model with tasks of suites, and puts the scores into its folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.folder_kinds import kind_of
from terakoya.inference.loading import find_model
from terakoya_quality.finetuning.benchmark import BenchmarkResult, Watch, benchmark
from terakoya_quality.finetuning.scores import versions, write_scores
from terakoya_quality.finetuning.suites import is_suite_task, suggest_suites

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("terakoya")


def measure_suites(
    source: Path,
    tasks: Sequence[str],
    data: Sequence[Path],
    *,
    corpora: Mapping[str, Any],
    tuning: Mapping[str, Any],
    limit: int | None,
    device: torch.device,
    precision: str,
    trust: bool,
    watch: Callable[[str], AbstractContextManager[Watch]] | None,
) -> tuple[BenchmarkResult, Mapping[str, Any]]:
    """Returns the scores of the model in `source` on `tasks`, and the settings that decide them. Those of a
    Transformers folder are written into it, too, after each task, except with a `limit`.

    Args:
        data: one folder with the tasks' files.

    Raises:
        UserError: other data or tasks of lm-eval were named as well, or what `benchmark` raises.
    """
    others = [task for task in tasks if not is_suite_task(task)]
    if others:
        raise UserError(
            f"--tasks {','.join(others)}: not together with suites; give tasks of lm-eval in a second command"
            f"{suggest_suites(others)}"
        )
    if corpora or len(data) != 1:
        raise UserError(
            f"--tasks {','.join(tasks)}: expected one --data FOLDER, with the tasks' files as they are published, and "
            "no --corpus"
        )
    watching = {} if watch is None else {"watch": watch}
    settings = {"limit": limit, "precision": precision, **versions()}

    def keep(finetuned: Mapping[str, Any]) -> None:
        if limit is None:
            keep_scores(source, finetuned, settings)

    result = benchmark(
        source,
        tasks,
        data[0],
        settings=tuning,
        limit=limit,
        device=device,
        precision=precision,
        trust=trust,
        keep=keep,
        **watching,
    )
    return result, settings


def keep_scores(source: Path, finetuned: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Writes scores into the folder of the model that was measured, if `source` is a Transformers model: of an ELECTRA
    with both models that of the discriminator."""
    if kind_of(source) == "Transformers model":
        folder, _ = find_model(source)
        try:
            write_scores(folder, source, finetuned, settings=settings)
        except OSError as error:
            logger.warning("%s", f"{folder}: the scores are not kept in the model's folder: {error}")
