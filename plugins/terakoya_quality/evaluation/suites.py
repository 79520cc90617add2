"""Measures a model with tasks of suites: it is fine-tuned on each, as the suite says, and scored. The scores go into
its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from terakoya.errors import UserError
from terakoya.folder_kinds import kind_of
from terakoya.inference.loading import find_model
from terakoya.toolkit.hub_cache import find_snapshot, is_hub_name
from terakoya_evaluation.result import Evaluation
from terakoya_quality.evaluation.options import TaskOptions
from terakoya_quality.finetuning.kinds import KINDS
from terakoya_quality.finetuning.model import ModelUse, finished_model
from terakoya_quality.finetuning.scores import versions, write_scores
from terakoya_quality.finetuning.search import Watch, search, summaries_as_json
from terakoya_quality.finetuning.settings import SHORTEST, TuningSettings
from terakoya_quality.finetuning.similarity import TextVectors, similarity_scores
from terakoya_quality.finetuning.suites import (
    SIMILARITY,
    ChosenTask,
    FoundFiles,
    bundled_suites,
    find_files,
    find_tasks,
    is_suite_task,
    suggest_suites,
)

logger = logging.getLogger("terakoya")


def measure_suites(options: TaskOptions, device: torch.device) -> Evaluation:
    """Returns the scores of the options' model, which is fine-tuned on each of their tasks. A task whose files are
    missing, or that the model does not fit, is skipped. The scores of a Transformers folder are written into it, too,
    after each task, except with a `limit`.

    Raises:
        UserError: other data or tasks of lm-eval were named as well, an option does not fit, there is no such task, or
            all tasks are skipped.
    """
    _check(options)
    given = {**(options.tuning or {}), **({} if options.length is None else {"max_length": options.length})}
    tasks = find_tasks(options.tasks)
    tunings = {each.name: each.settings(given) for each in tasks}
    data = _find_data(options.stores[0])
    # a user's own suite means the rates that it names
    suit = () if given.keys() & {"learning_rates", "optimizer"} else tuple(bundled_suites().values())
    files: dict[str, FoundFiles] = {}
    skipped: dict[str, str] = {}
    for each in tasks:
        try:
            files[each.name] = find_files(each, data)
        except UserError as error:
            skipped[each.name] = str(error)
    if not files:
        raise UserError("\n".join(skipped.values()))
    for reason in skipped.values():
        logger.warning("%s", f"skipped: {reason}")
    use = ModelUse.for_training(device, options.precision, trust=options.trust_remote_code)
    untrained = replace(use, precision=options.model_precision)
    settings = {"limit": options.limit, "precision": use.precision, **versions()}
    finetuned: dict[str, Any] = {}
    with finished_model(options.source) as folder:
        for each in tasks:
            if each.name not in files:
                continue
            with options.watch(each.task.title) as watched:
                try:
                    rows = files[each.name].read(options.limit)
                    how = untrained if each.task.task == SIMILARITY else use
                    found = _measure(folder, each, rows, tunings[each.name], how, watched, suit=each.suite in suit)
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
                "limit": options.limit,
                "published": [] if options.limit is not None else _list_published(each),
            }
            if options.limit is None:
                keep_scores(options.source, finetuned, settings)
    if not finetuned:
        raise UserError("\n".join(skipped.values()))
    return Evaluation(options.source, "fine-tuning", settings, finetuned=finetuned, skipped=skipped)


def _check(options: TaskOptions) -> None:
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
    if options.corpora or options.corpus or len(data) != 1:
        raise UserError(
            f"--tasks {','.join(tasks)}: expected one --data FOLDER, with the tasks' files as they are published, and "
            "no --corpus"
        )


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


def _measure(
    folder: Path,
    chosen: ChosenTask,
    sets: Mapping[str, Any],
    tuning: TuningSettings,
    use: ModelUse,
    watch: Watch,
    *,
    suit: bool,
) -> dict[str, Any]:
    if chosen.task.task != SIMILARITY:
        kind = KINDS[chosen.task.task]
        return search(folder, kind, sets, tuning, use=use, shorten=True, suit=suit, watch=watch).as_json()
    vectors = TextVectors(folder, max_length=tuning.max_length, use=use)
    scores = {name: similarity_scores(vectors, rows, batch_size=tuning.batch_size) for name, rows in sets.items()}
    return {
        "task": chosen.task.task,
        "settings": {"max_length": vectors.encoder.max_length, "pooling": "mean", "precision": use.precision},
        "scores": summaries_as_json([scores]),
        "examples": {name: len(rows) for name, rows in sets.items()},
        "cut": {"all": vectors.encoder.cut} if vectors.encoder.cut else {},
        "trainings": [],
    }


def _list_published(chosen: ChosenTask) -> list[dict[str, Any]]:
    return [
        {**each.model_dump(mode="json"), "source": chosen.suite.sources[each.source]} for each in chosen.task.published
    ]


def keep_scores(source: Path, finetuned: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Writes scores into the folder of the model that was measured, if `source` is a Transformers model: of an ELECTRA
    with both models that of the discriminator."""
    if kind_of(source) == "Transformers model":
        folder, _ = find_model(source)
        try:
            write_scores(folder, source, finetuned, settings=settings)
        except OSError as error:
            logger.warning("%s", f"{folder}: the scores are not kept in the model's folder: {error}")
