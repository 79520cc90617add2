"""Measures a finished model with tasks of suites: it is fine-tuned on each, as the suite says, and scored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.toolkit.hub_cache import find_snapshot, is_hub_name
from terakoya_quality.finetuning.kinds import KINDS
from terakoya_quality.finetuning.model import ModelUse, finished_model
from terakoya_quality.finetuning.search import Callbacks, Watch, search, summaries_as_json
from terakoya_quality.finetuning.similarity import TextVectors, similarity_scores
from terakoya_quality.finetuning.suites import SIMILARITY, ChosenTask, FoundFiles, find_files, find_tasks

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class BenchmarkResult:
    """The results of tasks, in their order.

    Attributes:
        finetuned: name -> result as JSON: `title`, `suite`, `task`, `settings`, `scores`, `published`, ...
        skipped: name -> why the task was not done.
    """

    finetuned: Mapping[str, Any]
    skipped: Mapping[str, str]


def watch_nothing(title: str) -> AbstractContextManager[Watch]:
    """Lets nobody follow the trainings of the task `title`."""
    return nullcontext(Callbacks())


def benchmark(
    source: Path,
    names: Sequence[str],
    data: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    limit: int | None = None,
    use: ModelUse,
    watch: Callable[[str], AbstractContextManager[Watch]] = watch_nothing,
    keep: Callable[[Mapping[str, Any]], None] = lambda finetuned: None,
) -> BenchmarkResult:
    """Fine-tunes the model in `source` on each of the tasks, and scores it. A task whose files are missing, or that the
    model does not fit, is skipped.

    Args:
        names: suites, tasks of bundled suites, and suite files.
        data: the folder with their files, or the name of a data set in the Hugging Face Hub's cache.
        settings: settings of the fine-tuning that replace those of the suites.
        limit: the largest number of examples of each file.
        keep: receives all results so far after each task.

    Raises:
        UserError: there is no such task, or all tasks are skipped.
    """
    tasks = find_tasks(names)
    chosen_settings = {each.name: each.settings(settings or {}) for each in tasks}
    folder_of_files = _find_data(data)
    files: dict[str, FoundFiles] = {}
    skipped: dict[str, str] = {}
    for each in tasks:
        try:
            files[each.name] = find_files(each, folder_of_files)
        except UserError as error:
            skipped[each.name] = str(error)
    if not files:
        raise UserError("\n".join(skipped.values()))
    for reason in skipped.values():
        logger.warning("%s", f"skipped: {reason}")
    finetuned: dict[str, Any] = {}
    with finished_model(source) as folder:
        for each in tasks:
            if each.name not in files:
                continue
            tuning = chosen_settings[each.name]
            with watch(each.task.title) as watched:
                try:
                    read = files[each.name].read(limit)
                    if each.task.task == SIMILARITY:
                        vectors = TextVectors(folder, max_length=tuning.max_length, use=use)
                        found = _without_training(each, vectors, read, batch_size=tuning.batch_size)
                    else:
                        kind = KINDS[each.task.task]
                        found = search(folder, kind, read, tuning, use=use, shorten=True, watch=watched).as_json()
                except UserError as error:
                    skipped[each.name] = f"{each.task.title}: {error}"
                    if len(files) > 1:  # a single one is the error
                        logger.warning("%s", f"skipped: {skipped[each.name]}")
                    continue
            finetuned[each.name] = {
                "title": each.task.title,
                "suite": each.suite.name,
                **found,
                "shown": list(each.task.scores),
                "limit": limit,
                "published": [] if limit is not None else _list_published(each),
            }
            keep(finetuned)
    if not finetuned:
        raise UserError("\n".join(skipped.values()))
    return BenchmarkResult(finetuned, skipped)


def _find_data(data: Path) -> Path:
    """Returns the folder `data`, or that of the data set of this name in the Hub's cache. Raises UserError if there is
    neither."""
    if data.is_dir():
        return data
    if (snapshot := find_snapshot(str(data), "dataset")) is not None:
        return snapshot
    if is_hub_name(str(data)):
        raise UserError(
            f"--data {data}: expected the folder with the tasks' files, as they are published; no such folder. If it "
            f"is a data set on the Hugging Face Hub: nothing is downloaded here; fetch it first: hf download {data} "
            "--repo-type dataset"
        )
    raise UserError(f"--data {data}: expected the folder with the tasks' files, as they are published; no such folder")


def _without_training(
    chosen: ChosenTask, vectors: TextVectors, sets: Mapping[str, Any], *, batch_size: int
) -> dict[str, Any]:
    """Returns the result of a task of similarity in the form of `SearchResult.as_json`."""
    scores = {name: similarity_scores(vectors, rows, batch_size=batch_size) for name, rows in sets.items()}
    return {
        "task": chosen.task.task,
        "settings": {"max_length": vectors.encoder.max_length, "pooling": "mean"},
        "scores": summaries_as_json([scores]),
        "examples": {name: len(rows) for name, rows in sets.items()},
        "cut": {"all": vectors.encoder.cut} if vectors.encoder.cut else {},
        "trainings": [],
    }


def _list_published(chosen: ChosenTask) -> list[dict[str, Any]]:
    return [
        {**each.model_dump(mode="json"), "source": chosen.suite.sources[each.source]} for each in chosen.task.published
    ]
