"""Fine-tunes a finished model on a user's files, and writes a folder with its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from terakoya.atomic_files import check_new_folder, new_folder
from terakoya.inference.loading import find_device
from terakoya_quality.finetuning.kinds import find_kind
from terakoya_quality.finetuning.model import finished_model, load_with_head, write_model
from terakoya_quality.finetuning.rows import read_rows
from terakoya_quality.finetuning.scores import write_scores
from terakoya_quality.finetuning.search import SearchResult, TrainedOnce, search
from terakoya_quality.finetuning.settings import TuningSettings


def finetune(
    source: Path,
    out: Path,
    *,
    task: str,
    train: Path,
    eval: Path,
    test: Path | None = None,
    columns: Mapping[str, str] | None = None,
    settings: TuningSettings | None = None,
    limit: int | None = None,
    device: str | None = None,
    precision: str = "fp32",
    trust_remote_code: bool = False,
    report: Callable[[TrainedOnce], None] = lambda trained: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Fine-tunes the model in `source`, a Transformers folder, a checkpoint or a run, and writes the folder `out`.

    `out` has the model of the best seed with its head, the tokenizer, and the scores in `terakoya_scores.json`,
    with the `limit`.

    Args:
        task: classification, regression, choice, ner or qa.
        train, eval, test: files of examples; `eval` chooses between settings, `test` chooses nothing.
        columns: the name that a task has for a column -> the files' own.
        settings: what is tried, and how.
        limit: the largest number of examples of each file.
        device: by default the first GPU, or the CPU.
        precision: fp32 or bf16.
        report: receives each training when it is done.
        progress: receives the steps done and the steps of a training.

    Raises:
        UserError: the files, the task and the model do not fit together.
    """
    kind = find_kind(task)
    check_new_folder(out)
    files = {"train": train, "eval": eval, **({} if test is None else {"test": test})}
    sets = {name: read_rows(file, columns=columns, limit=limit) for name, file in files.items()}
    chosen_device = find_device(device, precision=precision)
    with finished_model(source) as folder:
        result = search(
            folder, kind, sets, settings or TuningSettings(), device=chosen_device, precision=precision,
            trust=trust_remote_code, report=report, progress=progress,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]), new_folder(out) as draft:
            model = load_with_head(folder, result.task, seed=1, trust=trust_remote_code, pad=result.pad)
            model.load_state_dict(result.best_weights)
            write_model(model, folder, draft)
            write_scores(draft, source, {eval.name: {**result.as_json(), "limit": limit}}, settings={})
    return result
