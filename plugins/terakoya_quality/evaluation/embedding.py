"""Tasks of sentence embedding such as JMTEB, which the package mteb measures, if it is installed.

The model stays as it is. A text's vector is the mean of its last hidden states, with length 1, as in the export for
sentence-transformers. Nothing is downloaded: a task whose data are not in the cache of the Hugging Face Hub is skipped.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from terakoya.errors import UserError, nearest
from terakoya_evaluation.result import Evaluation
from terakoya_quality.evaluation.embedding_data import fetch_command, find_data, load_data, offline
from terakoya_quality.evaluation.options import TaskOptions
from terakoya_quality.evaluation.suites import keep_scores
from terakoya_quality.finetuning.model import ModelUse, finished_model
from terakoya_quality.finetuning.scores import versions
from terakoya_quality.finetuning.search import Watch, summaries_as_json
from terakoya_quality.finetuning.similarity import TextVectors

logger = logging.getLogger("terakoya")

BENCHMARKS = {"jmteb": "JMTEB(v2)", "jmteb_lite": "JMTEB-lite(v1)"}
"""Name on the command line -> mteb's. A task of it is written behind a colon: jmteb:JSTS."""
BATCH_SIZE = 32
BATCHES_TOGETHER = 64
"""Batches whose texts are sorted by length, and after which the progress is shown."""


def is_embedding_task(name: str) -> bool:
    """Returns whether `name` is a benchmark of mteb, or a task of one."""
    return name.partition(":")[0] in BENCHMARKS


def measure_embedding(options: TaskOptions, device: torch.device) -> Evaluation:
    """Returns the scores of the options' model on their benchmarks and tasks, see `BENCHMARKS`, of texts of at most
    `length` tokens, by default 512, or the model's limit if that is less. The scores are written into the folder of a
    Transformers model, after each task.

    Raises:
        UserError: there is no such task, mteb or the data of all tasks are missing, or an option does not fit.
    """
    source, names = options.source, options.tasks
    if others := [name for name in names if not is_embedding_task(name)]:
        raise UserError(f"--tasks {','.join(others)}: not together with jmteb; give it in a second command")
    not_for_it = options.tuned
    batch_size = not_for_it.pop("--batch-size", BATCH_SIZE)
    not_for_it |= {
        "--data": options.stores, "--corpus": options.corpora or options.corpus, "--limit": options.limit,
        "--stride": options.stride,
    }  # fmt: skip
    if given := [option for option, value in not_for_it.items() if value]:
        raise UserError(
            f"{given[0]}: not for tasks of jmteb, which train nothing and read all of their own data; leave it out"
        )
    if importlib.util.find_spec("mteb") is None:
        raise UserError('--tasks: mteb is not installed; expected the extra "mteb": pip install "terakoya[mteb]"')
    tasks = _find_tasks(names)
    folders = {name: find_data(task) for name, task in tasks.items()}
    skipped = {name: "its data are not in the Hub's cache" for name, folder in folders.items() if folder is None}
    if skipped:
        fetch = fetch_command([tasks[name] for name in skipped])
        text = (
            f"{', '.join(skipped)}: the data are not in the cache of the Hugging Face Hub, and nothing is downloaded "
            f"here; fetch them first: {fetch}"
        )
        if len(skipped) == len(tasks):
            raise UserError(text)
        logger.warning("%s", f"skipped: {text}")
    settings = {"precision": options.model_precision, **versions()}
    use = ModelUse(device=device, precision=options.model_precision, trust=options.trust_remote_code)
    finetuned: dict[str, Any] = {}
    with finished_model(source) as folder, offline() as temporary:
        vectors = TextVectors(folder, max_length=options.length, use=use)
        for name, snapshot in folders.items():
            if snapshot is None:
                continue
            task, suite = tasks[name], BENCHMARKS[name.partition(":")[0]]
            title = f"{suite}: {task.metadata.name}"
            with options.watch(title) as watched:
                try:
                    load_data(task, snapshot, temporary / name.replace(":", "-"))
                    found = _measure(task, vectors, batch_size, watched)
                except UserError as error:
                    skipped[name] = f"{name}: {error}"
                    logger.warning("%s", f"skipped: {skipped[name]}")
                    continue
            finetuned[name] = {"title": title, "suite": suite, **found}
            keep_scores(source, finetuned, settings)
    if not finetuned:
        raise UserError("\n".join(skipped.values()))
    for suite in BENCHMARKS:
        if suite in names and not any(name.startswith(f"{suite}:") for name in skipped):
            finetuned[suite] = mean_of_tasks(suite, finetuned)
            keep_scores(source, finetuned, settings)
    return Evaluation(source, "embedding", settings, finetuned=finetuned, skipped=skipped)


def mean_of_tasks(suite: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of a whole benchmark: the mean over its tasks, over the means of their kinds, and those means.
    A task's score is the mean over its sets of examples, as in mteb."""
    scores: dict[str, list[float]] = {}
    tasks = [each for name, each in results.items() if name.startswith(f"{suite}:")]
    for each in tasks:
        means_of_sets = [score["mean"] for found in each["scores"].values() for score in found.values()]
        sets = [math.nan if value is None else value for value in means_of_sets]
        scores.setdefault(f"mean_of_{each['task'].lower()}", []).append(float(np.mean(sets)))
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    every = [value for values in scores.values() for value in values]
    found = {"mean_of_tasks": float(np.mean(every)), "mean_of_kinds": float(np.mean(list(means.values()))), **means}
    shared = {name: tasks[0][name] for name in ("suite", "settings", "origin")}
    title = f"{BENCHMARKS[suite]}: all {len(tasks)} tasks"
    return {"title": title, "task": "mean", **shared, **_scores({"eval": found}), "cut": {}}


def _measure(task: Any, vectors: TextVectors, batch_size: int, watched: Watch) -> dict[str, Any]:
    import mteb

    encoder, cut = _Encoder(vectors, watched), vectors.encoder.cut
    options = {"batch_size": batch_size, "show_progress_bar": False}
    done = mteb.evaluate(
        encoder, task, co2_tracker=False, cache=None, raise_error=False, show_progress_bar=False, encode_kwargs=options
    )
    task.unload_data()
    if done.exceptions:
        raise UserError(f"mteb cannot measure it: {done.exceptions[0].exception}")
    (result,) = done.task_results
    score = task.metadata.main_score
    sets = {
        name: {score: float(np.mean([each["main_score"] for each in found]))} for name, found in result.scores.items()
    }
    version = importlib.metadata.version("mteb")
    return {
        "task": task.metadata.type,
        "data": {"revision": task.metadata.dataset["revision"], "languages": list(task.hf_subsets)},
        "settings": {"max_length": vectors.encoder.max_length, "pooling": "mean", "mteb": version},
        "origin": "vectors of texts, by mteb",
        **_scores(sets),
        "texts": encoder.texts,
        "cut": {"all": vectors.encoder.cut - cut} if vectors.encoder.cut > cut else {},
    }


def _scores(sets: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    return {"scores": summaries_as_json([sets]), "shown": list(next(iter(sets.values())))}


def _find_tasks(names: Sequence[str]) -> dict[str, Any]:
    import mteb

    found: dict[str, Any] = {}
    for name in names:
        suite, _, single = name.partition(":")
        tasks = {task.metadata.name: task for task in mteb.get_benchmark(BENCHMARKS[suite]).tasks}
        if single and single not in tasks:
            raise UserError(f"--tasks {name}: {BENCHMARKS[suite]} has no such task{nearest(single, tasks)}")
        found |= {f"{suite}:{each}": tasks[each] for each in ([single] if single else tasks)}
    return found


class _Encoder:
    """A model as mteb sees it (its `EncoderProtocol`)."""

    def __init__(self, vectors: TextVectors, watched: Watch) -> None:
        from mteb.models import ModelMeta

        self.vectors, self.watched, self.texts = vectors, watched, 0
        self.mteb_model_meta = ModelMeta.create_empty()

    def encode(self, inputs: Any, *, batch_size: int, **others: Any) -> np.ndarray:
        """Returns the vectors (N, hidden size) of the texts in mteb's batches `inputs`."""
        texts = [text for batch in inputs for text in batch["text"]]
        self.texts += len(texts)
        found, together = [], batch_size * BATCHES_TOGETHER
        for first in range(0, len(texts), together):
            found.append(self.vectors.vectors(texts[first : first + together], batch_size=batch_size))
            self.watched.progress(min(first + together, len(texts)), len(texts))
        joined = np.concatenate(found)
        return joined / np.maximum(np.linalg.norm(joined, axis=1, keepdims=True), 1e-12)

    def similarity(self, one: Any, other: Any) -> Any:
        from mteb.similarity_functions import cos_sim

        return cos_sim(one, other)

    def similarity_pairwise(self, one: Any, other: Any) -> Any:
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(one, other)
