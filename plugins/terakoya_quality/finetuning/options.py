"""The options of `terakoya finetune`, filled in by the command line or by `terakoya.finetune`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya_quality.finetuning.settings import TuningSettings

if TYPE_CHECKING:
    from terakoya_quality.finetuning.search import TrainedOnce


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Which model learns which task from which examples, and how.

    Attributes:
        source: the model: a Transformers folder, a checkpoint or a run.
        out: the new folder.
        task: classification, regression, choice, ner or qa.
        train, eval, test: files of examples; `eval` chooses between settings, `test` chooses nothing.
        columns: the name that a task has for a column -> the files' own.
        settings: what is tried, and how; None is `TuningSettings()`.
        limit: the largest number of examples of each file.
        device: by default the first GPU, or the CPU.
        precision: fp32 or bf16.
        trust_remote_code: whether to run Python code that the model's folder contains.
        report: receives each training when it is done.
        progress: receives the steps done and the steps of a training.
    """

    source: Path
    out: Path
    task: str
    train: Path
    eval: Path
    test: Path | None = None
    columns: Mapping[str, str] | None = None
    settings: TuningSettings | None = None
    limit: int | None = None
    device: str | None = None
    precision: str = "fp32"
    trust_remote_code: bool = False
    report: Callable[[TrainedOnce], None] = lambda trained: None
    progress: Callable[[int, int], None] = lambda done, total: None
