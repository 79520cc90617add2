"""Fine-tunes a model with several settings and seeds, and scores each: the machinery of `finetune` and of suites."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from terakoya.errors import UserError
from terakoya_quality.finetuning import loop
from terakoya_quality.finetuning.metrics import mean_and_interval
from terakoya_quality.finetuning.model import ModelUse, load_fast_tokenizer, load_with_head, longest_input, pad_id
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.settings import LONGEST, MUON, TuningSettings, muon_rate, suited_epochs, suited_rate
from terakoya_quality.finetuning.task import Feature, Task, TextEncoder

Scores = Mapping[str, float]
REMEMBERED = 0.02
"""The share of an evaluation set that may also be in the training set without a warning: short texts recur."""

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class TrainedOnce:
    """The scores of one training.

    Attributes:
        scores: set ("eval", "test") -> name -> score; empty if the loss was not finite.
        seconds: the time that training and scoring took.
    """

    learning_rate: float
    epochs: int
    seed: int
    scores: Mapping[str, Scores]
    seconds: float


class Watch(Protocol):
    """Who follows trainings."""

    def report(self, trained: TrainedOnce, /) -> None:
        """Receives each training when it is done."""

    def progress(self, done: int, total: int, /) -> None:
        """Receives the steps done and the steps of a training."""


@dataclass(frozen=True)
class Callbacks:
    """Implements `Watch` by two functions, which by default do nothing."""

    report: Callable[[TrainedOnce], None] = lambda trained: None
    progress: Callable[[int, int], None] = lambda done, total: None


@dataclass(frozen=True)
class Summary:
    """A score over seeds: the mean, half the width of its 95 % interval (None of one seed), and the values."""

    mean: float
    interval: float | None
    values: Sequence[float]


@dataclass(frozen=True)
class SearchResult:
    """All trainings of a task, and the scores of the chosen settings.

    Attributes:
        task: the task, with its labels.
        settings: as they were given, with the length of an input that was used.
        chosen: learning rate and epochs.
        scores: set -> name of a score -> its summary over the seeds.
        trainings: in the order in which they were made.
        examples: set -> number of examples.
        cut: set -> number of texts that were longer than an input.
        pad: the id that fills up short inputs.
        best_weights: of the training with the best first score among the chosen ones, on the CPU.
    """

    task: Task[Any]
    settings: TuningSettings
    chosen: tuple[float, int]
    scores: Mapping[str, Mapping[str, Summary]]
    trainings: Sequence[TrainedOnce]
    examples: Mapping[str, int]
    cut: Mapping[str, int]
    pad: int
    best_weights: Mapping[str, Tensor] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object; NaN, which JSON does not have, becomes null."""
        return {
            "task": self.task.name,
            "settings": {
                **self.settings.model_dump(mode="json", exclude={"learning_rates", "epochs"}),
                "learning_rate": self.chosen[0],
                "epochs": self.chosen[1],
            },
            "scores": _as_json(self.scores),
            "examples": dict(self.examples),
            "cut": dict(self.cut),
            "trainings": [_as_json(replace(each, seconds=round(each.seconds, 1))) for each in self.trainings],
        }


def summaries_as_json(trainings: Sequence[Mapping[str, Scores]]) -> dict[str, Any]:
    """Returns the summaries of the scores of several trainings, set -> name -> score, as a JSON object."""
    found: dict[str, Any] = _as_json(summarise(trainings))
    return found


def _as_json(value: Any) -> Any:
    if isinstance(value, Summary | TrainedOnce):
        return _as_json(asdict(value))
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def search(
    folder: Path,
    kind: type[Task[Any]],
    sets: Mapping[str, Sequence[Row]],
    settings: TuningSettings,
    *,
    use: ModelUse,
    shorten: bool = False,
    suit: bool = False,
    watch: Watch = Callbacks(),
) -> SearchResult:
    """Fine-tunes the model in `folder` and returns the scores.

    Args:
        sets: "train", "eval" and, if there is one, "test" -> rows. Nothing is chosen by "test".
        shorten: whether a model that takes less than `settings.max_length` tokens gets what it takes, and no error.
        suit: whether rates of AdamW that are too low for so small a model give way to those that suit it.

    Raises:
        UserError: rows are no examples of the task, or without a token; the model has no head for it, or every training
            diverged.
    """
    task = kind(sets["train"])
    examples = {name: task.read(rows) for name, rows in sets.items()}
    tokenizer = load_fast_tokenizer(folder, trust=use.trust, needs_offsets=task.needs_offsets)
    with torch.random.fork_rng(devices=[use.device] if use.device.type == "cuda" else []):
        model = load_with_head(folder, task, seed=1, trust=use.trust)
        settings = _with_rates(settings, model.num_parameters(), suits_muon=task.suits_muon, suit=suit)
        settings = settings.model_copy(
            update={"max_length": longest_input(model, settings.max_length, default=LONGEST, shorten=shorten)}
        )
        pad = pad_id(tokenizer, model, folder)
        encoders = {
            name: TextEncoder(tokenizer, max_length=settings.max_length or LONGEST, stride=settings.stride)
            for name in sets
        }
        features = {name: task.features(each, encoders[name]) for name, each in examples.items()}
        for name, rows in sets.items():
            for feature in features[name]:
                if not all(inputs["input_ids"] for inputs in feature.inputs):
                    rows[feature.example].refuse(
                        "its text has no tokens, and this model's tokenizer adds none; leave the example out"
                    )

        _warn_of_remembered(features, examples)
        trainings: list[TrainedOnce] = []
        best: tuple[TrainedOnce, dict[str, Tensor]] | None = None

        def train_once(learning_rate: float, epochs: int, seed: int) -> tuple[TrainedOnce, dict[str, Tensor]]:
            """Adds a training to `trainings`; returns it with its weights, or `best` where that is no worse."""
            start = time.monotonic()
            model = load_with_head(folder, task, seed=seed, trust=use.trust, pad=pad)
            model.to(use.device)
            batches = loop.Batches(model, task, pad=pad, precision=use.precision)
            finite = loop.train(
                batches, features["train"], settings, learning_rate=learning_rate, epochs=epochs, seed=seed,
                progress=watch.progress,
            )  # fmt: skip
            logits = {name: loop.predict(batches, features[name], batch_size=settings.batch_size)
                      for name in examples if name != "train" and finite}  # fmt: skip
            scores = {name: task.scores(examples[name], features[name], each) for name, each in logits.items()}
            trained = TrainedOnce(learning_rate, epochs, seed, scores, time.monotonic() - start)
            watch.report(trained)
            trainings.append(trained)
            if best is not None and _first(task, trained) <= _first(task, best[0]):
                return best
            return trained, {name: weight.detach().cpu() for name, weight in model.state_dict().items()}

        tried = settings.epochs or (suited_epochs(math.ceil(len(features["train"]) / settings.batch_size)),)
        for rate, epochs in itertools.product(settings.learning_rates or (), tried):
            best = train_once(rate, epochs, 1)
        assert best is not None
        chosen = (best[0].learning_rate, best[0].epochs)
        of_chosen = [best[0]]
        for seed in range(2, settings.seeds + 1):
            best = train_once(*chosen, seed)
            of_chosen.append(trainings[-1])
    if not all(each.scores for each in of_chosen):
        raise UserError(
            f"{folder}: the loss is not finite with learning rate {chosen[0]:g}; try smaller ones, such as "
            f"{chosen[0] / 5:g}"
        )
    counts = {name: len(each) for name, each in examples.items()}
    return SearchResult(
        task, settings, chosen, summarise([each.scores for each in of_chosen]), trainings, counts,
        {name: each.cut for name, each in encoders.items() if each.cut}, pad, best[1],
    )  # fmt: skip


def _warn_of_remembered(features: Mapping[str, Sequence[Feature]], examples: Mapping[str, Sequence[Any]]) -> None:
    """Warns of sets of which the training examples hold a share, as the model reads them."""

    def read(feature: Feature) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(inputs["input_ids"]) for inputs in feature.inputs)

    learned = set(map(read, features["train"]))
    for name in examples.keys() - {"train"}:
        count = len({each.example for each in features[name] if read(each) in learned})
        if count > REMEMBERED * len(examples[name]):
            logger.warning(
                "%s: %s of %s examples are among the training examples: the scores tell how well they are remembered",
                name, f"{count:,}", f"{len(examples[name]):,}",
            )  # fmt: skip


def _with_rates(settings: TuningSettings, parameters: int, *, suits_muon: bool, suit: bool) -> TuningSettings:
    """Returns the settings for a model of so many `parameters`; warns where it is small and gets AdamW with the rates
    of large ones, or with `suit` had got them."""
    given, suited = settings.for_model(parameters, suits_muon=suits_muon), suited_rate(parameters)
    if given.optimizer != {"type": "adamw"} or (highest := max(given.learning_rates or ())) >= suited / 2:
        return given
    if suit:
        own = settings.model_copy(update={"optimizer": None, "learning_rates": None})
        better = own.for_model(parameters, suits_muon=suits_muon)
        assert better.optimizer is not None and better.learning_rates is not None, "both are chosen"
        logger.warning(
            "%.1f M parameters learn little with a rate of %g, which is for larger models: %s with %g is taken; "
            "--learning-rate takes others",
            parameters / 1e6, highest, better.optimizer["type"], better.learning_rates[0],
        )  # fmt: skip
        return better
    option = f"--learning-rate {suited:g}"
    if suits_muon and (of_muon := muon_rate(parameters)):
        option = f"--optimizer '{json.dumps(MUON)}' --learning-rate {of_muon:g}"
    logger.warning(
        "%.1f M parameters learn little with a rate of %g: such a small model needs about %s",
        parameters / 1e6, highest, option,
    )  # fmt: skip
    return given


def _first(task: Task[Any], trained: TrainedOnce) -> float:
    """Returns the score that chooses; less than any other if the training diverged or the score is undefined."""
    value = trained.scores["eval"][task.metrics[0]] if trained.scores else math.nan
    return value if math.isfinite(value) else -math.inf


def summarise(trainings: Sequence[Mapping[str, Scores]]) -> dict[str, dict[str, Summary]]:
    """Returns set -> name of a score -> its summary over `trainings`, which have the same sets and scores."""
    found: dict[str, dict[str, Summary]] = {}
    for name, scores in trainings[0].items():
        values = {score: [each[name][score] for each in trainings] for score in scores}
        found[name] = {score: Summary(*mean_and_interval(each), each) for score, each in values.items()}
    return found
