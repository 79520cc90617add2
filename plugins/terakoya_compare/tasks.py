"""Fine-tunes models for tasks with the same seeds and the same order of examples, and compares them by example.

Two questions have two tests: whether other examples would say the same of these models (`examples`), and whether other
seeds of the fine-tuning would (`seeds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from terakoya.errors import UserError
from terakoya.folder_kinds import distinct_names
from terakoya.inference.loading import find_device
from terakoya.plugins.families import missing_family
from terakoya_compare.options import CompareOptions
from terakoya_compare.result import Comparison, Difference
from terakoya_compare.statistics import bootstrap, bootstrap_of_sums, paired_t, sign_flip_p

if TYPE_CHECKING:
    from terakoya_quality.finetuning.model import ModelUse
    from terakoya_quality.finetuning.suites import ChosenTask
    from terakoya_quality.finetuning.task import Feature, Task

Statistic = Callable[[np.ndarray], float]
"""Numbers of examples (n,) -> the score of these."""


@dataclass
class Outcomes:
    """What a model answers to the examples of a task, after the fine-tuning with each seed.

    Attributes:
        examples: their number, n.
        right: for each seed whether the answers are, (n,) bool; empty for numbers.
        scores: for each seed the scores by name, of any choice of examples.
    """

    examples: int = 0
    right: list[np.ndarray] = field(default_factory=list)
    scores: list[Mapping[str, Statistic]] = field(default_factory=list)


def compare_tasks(options: CompareOptions) -> Comparison:
    """Returns the differences of the scores of models that are fine-tuned for tasks.

    Raises:
        UserError: the family quality or the files are missing, or a model does not fit a task.
    """
    if find_spec("terakoya_quality") is None:
        raise UserError(f"--task: fine-tuning is not there{missing_family('verbs', 'finetune')}")
    from terakoya_quality.finetuning.model import ModelUse
    from terakoya_quality.finetuning.suites import SIMILARITY, find_files, find_tasks

    if options.data is None:
        raise UserError("--task: expected --data, the folder with the tasks' files")
    tuning = {} if options.seeds is None else {"seeds": options.seeds}
    tasks = [task for task in find_tasks(options.tasks) if task.task.task != SIMILARITY]
    if not tasks:
        raise UserError(f"--task {', '.join(options.tasks)}: has nothing to learn, and so no seeds to compare")
    names = [source.name for source in options.sources]
    if len({*names}) < len(names):
        names = distinct_names(options.sources)
    differences, notes = [], []
    device = find_device(options.device, precision=options.precision or "fp32")
    use = ModelUse.for_training(device, options.precision, trust=options.trust_remote_code)
    for task in tasks:
        files = find_files(task, options.data)
        compared = "test" if "test" in files.layout.sets & ({*files.paths} | {*files.layout.shares}) else "eval"
        if compared == "eval":
            notes.append(f"{task.name}: has no test set: the examples that are compared chose the settings, too")
        found = [_outcomes(options, source, task, files, tuning, compared, use) for source in options.sources]
        for number in range(1, len(names)):
            differences += _differences(task, found[0], found[number], (names[0], names[number]))
    if any(len(each.further["seeds"][0]) == 1 for each in differences):
        notes.append("one seed: whether another one of the fine-tuning says the same is not known")
    settings = {"seeds": options.seeds, "limit": options.limit, "precision": use.precision}
    return Comparison("tasks", settings, differences, notes)


def _outcomes(
    options: CompareOptions,
    source: Path,
    task: ChosenTask,
    files: Any,
    tuning: Mapping[str, Any],
    compared: str,
    use: ModelUse,
) -> Outcomes:
    """Fine-tunes the model `source` and returns its answers to the examples of the set `compared`."""
    from terakoya_quality.commands.training_scores import TuningProgress
    from terakoya_quality.finetuning.kinds import KINDS
    from terakoya_quality.finetuning.model import finished_model
    from terakoya_quality.finetuning.search import Callbacks, TrainedOnce, search
    from terakoya_quality.finetuning.suites import bundled_suites

    scored: list[tuple[Task[Any], Sequence[Any], Sequence[Feature], Sequence[np.ndarray]]] = []
    trained: dict[tuple[float, int, int], list[Any]] = {}
    base: Any = KINDS[task.task.task]

    class Recorded(base):
        """The task, which remembers what it scores."""

        def scores(self, examples: Any, features: Any, logits: Any) -> dict[str, float]:
            scored.append((self, examples, features, logits))
            found: dict[str, float] = super().scores(examples, features, logits)
            return found

    sets = files.read(options.limit)
    with finished_model(source) as folder, TuningProgress(f"{source.name}, {task.task.title}") as shown:

        def report(each: TrainedOnce) -> None:
            trained[each.learning_rate, each.epochs, each.seed] = list(zip(each.scores, scored, strict=True))
            scored.clear()
            shown.report(each)

        settings, suit = task.settings(tuning), task.suite in bundled_suites().values()
        watch = Callbacks(report, shown.progress)
        result = search(folder, Recorded, sets, settings, use=use, shorten=True, suit=suit, watch=watch)
    outcomes = Outcomes()
    for seed in range(1, settings.seeds + 1):
        of_set = next(answered for name, answered in trained[*result.chosen, seed] if name == compared)
        right, scores = answers(*of_set)
        outcomes.examples = len(of_set[1])
        outcomes.scores.append({name: each for name, each in scores.items() if name in task.task.scores})
        if right is not None:
            outcomes.right.append(right)
    return outcomes


def answers(
    task: Task[Any], examples: Sequence[Any], features: Sequence[Feature], logits: Sequence[np.ndarray]
) -> tuple[np.ndarray | None, Mapping[str, Statistic]]:
    """Returns which examples a model has right, (n,) bool, None where the answer is a number; and its scores of any
    choice of examples, which for all of them are those of `Task.scores` that a model decides."""
    from terakoya_quality.finetuning import metrics
    from terakoya_quality.finetuning.entities import NamedEntities

    if task.name == "qa":
        of_example: list[list[int]] = [[] for _ in examples]
        for number, feature in enumerate(features):
            of_example[feature.example].append(number)
        singles = [
            task.scores([example], [replace(features[n], example=0) for n in numbers], [logits[n] for n in numbers])
            for example, numbers in zip(examples, of_example, strict=True)
        ]
        values = {name: np.array([each[name] for each in singles]) for name in singles[0]}
        return values["exact_match"] == 1, {name: partial(_mean, each) for name, each in values.items()}
    if isinstance(task, NamedEntities):
        predicted = [set(task.decode_spans(each, own)) for each, own in zip(features, logits, strict=True)]
        gold = [set(each.spans) for each in examples]
        counts = np.array([(len(a & b), len(a), len(b)) for a, b in zip(predicted, gold, strict=True)])
        found = {name: partial(_of_spans, counts, name) for name in ("f1", "precision", "recall")}
        return np.array([a == b for a, b in zip(predicted, gold, strict=True)]), found
    if task.name == "regression":
        numbers, true = np.array(logits), np.array([each.target for each in examples])
        by_name = {"pearson": metrics.pearson, "spearman": metrics.spearman}
        return None, {name: partial(_of_arrays, score, numbers, true) for name, score in by_name.items()}
    labels = np.array([each.argmax() for each in logits])
    true = np.array([each.answer if task.name == "choice" else each.target for each in examples])
    by_name = {"accuracy": metrics.accuracy}
    if task.name == "classification":
        by_name |= {"macro_f1": metrics.macro_f1, "matthews": metrics.matthews}
    if task.name == "classification" and len(task.labels) == 2:
        by_name["f1"] = partial(metrics.f1, label=1)
    return labels == true, {name: partial(_of_arrays, score, labels, true) for name, score in by_name.items()}


def _mean(values: np.ndarray, chosen: np.ndarray) -> float:
    return float(values[chosen].mean())


def _of_arrays(
    score: Callable[[np.ndarray, np.ndarray], float], predicted: np.ndarray, gold: np.ndarray, chosen: np.ndarray
) -> float:
    return score(predicted[chosen], gold[chosen])


def _of_spans(counts: np.ndarray, name: str, chosen: np.ndarray) -> float:
    right, guessed, true = counts[chosen].sum(axis=0).tolist()
    found: float = {
        "f1": 2 * right / max(1, guessed + true), "precision": right / max(1, guessed), "recall": right / max(1, true)
    }[name]  # fmt: skip
    return found


RIGHT = ("accuracy", "exact_match")
"""Scores that are the share of examples which are right."""


def _differences(task: ChosenTask, one: Outcomes, other: Outcomes, names: tuple[str, str]) -> list[Difference]:
    """Returns the differences of the scores of a task, by its examples, and by seeds where there are several."""
    differences = []
    seeds, size = len(one.scores), one.examples
    every = np.arange(size)
    for score in one.scores[0]:
        of_seed = [np.array([scores[score](every) for scores in side.scores]) for side in (one, other)]
        values = (float(of_seed[0].mean()), float(of_seed[1].mean()))
        if score in RIGHT and one.right:
            changes = sum(b.astype(np.int64) - a for a, b in zip(one.right, other.right, strict=True))
            test = bootstrap_of_sums((changes / seeds)[:, None], lambda sums: sums[:, 0] / size)
            test = replace(test, p=sign_flip_p(changes))
            method = "McNemar" if seeds == 1 else "exact sign flips"
        else:
            pairs = list(zip(one.scores, other.scores, strict=True))
            test = bootstrap(size, partial(_mean_difference, pairs, score))
            method = "paired bootstrap"
        further = {"examples": size, "seeds": [side.tolist() for side in of_seed]}
        rows = [(test, f"{size:,} examples", method)]
        if seeds > 1:
            rows.append((paired_t(*of_seed), f"{seeds} seeds", "paired t"))
        differences += [
            Difference(
                task.task.title, score, names, values, each, pairs_, how, larger_is_better=True, further=further
            )
            for each, pairs_, how in rows
        ]  # fmt: skip
    return differences


def _mean_difference(
    pairs: Sequence[tuple[Mapping[str, Statistic], Mapping[str, Statistic]]], score: str, chosen: np.ndarray
) -> float:
    return float(np.mean([other[score](chosen) - one[score](chosen) for one, other in pairs]))
