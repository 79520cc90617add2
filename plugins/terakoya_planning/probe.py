"""Takes a few real training steps of a run on this machine, to know how fast it will be.

The steps are those of `terakoya train`: its loader, objective, engine and optimizer, on rows of random tokens. Where
steps of the whole model take too long, models of fewer layers are timed, and the rest is extrapolated linearly, because
layers are equal; where even these take too long, on fewer rows, too.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from terakoya.checking.fake_tensors import number_of_layers, with_depth
from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.rows.stores import Stores
from terakoya.store.token_store import TokenStore
from terakoya.store.writer import write_store
from terakoya.toolkit.attributes import replace_level
from terakoya.training.model import determinism
from terakoya.training.run_log import RunLog
from terakoya.training.setup import build_trainer, free_memory
from terakoya.training.trainer import Trainer
from terakoya_planning.row_statistics import ONE_A_ROW
from terakoya_planning.step_rate import LEAST_STEPS, StepRate, time_steps

SECONDS = 20.0
"""How long a probe may take, about: no further step is begun that would end later."""
FEW_ROWS = 1
"""Rows of the first steps on a CPU, which show how long all others will take. A GPU takes as long for a few."""
TIMED = LEAST_STEPS + 2
"""How many steps' time it takes to time the fewest steps: one before them, and two evaluations after them."""
LONG_ENOUGH = 6.0
"""Seconds of steps of the whole model after which more of them say nothing new."""
ROWS_IN_STORE = 64


@dataclass(frozen=True)
class Sample:
    """What is timed.

    Attributes:
        layers: of the model; 0 where its depth cannot be changed.
        rows: of a micro-batch.
    """

    layers: int
    rows: int


@dataclass(frozen=True)
class Timed:
    """The rate of a sample, and `build`: the seconds that it took to build its model."""

    rate: StepRate
    build: float


@dataclass(frozen=True)
class Probed:
    """The rate of a run, and `said`: in words, what was timed."""

    rate: StepRate
    said: str


Timer = Callable[[Sample, float], Timed]
"""Times steps of a sample for about so many seconds."""


def probe(
    parameters: Parameters, context: DistributedContext, *, vocab_size: int, rows: int, micro_steps: int,
    seconds: float = SECONDS,
) -> Probed | None:  # fmt: skip
    """Returns the rate of the run of `parameters` in the processes of `context`, in about `seconds` after the first
    model has been built; None where even a small part of a step takes longer. `rows` are those of a micro-batch of each
    process; a step has `micro_steps` of them. Collective."""
    began = 0.0

    def remaining() -> float:
        return float(context.broadcast(began + seconds - time.perf_counter()))

    layers = number_of_layers(parameters.architecture) if with_depth(parameters, 1) is not None else 0
    accumulates = micro_steps > 1 and context.world_size > 1
    with tempfile.TemporaryDirectory(prefix="terakoya-probe-") as folder:
        store = _write_store(Path(folder), parameters, vocab_size)

        def time_sample(sample: Sample, enough: float) -> Timed:
            nonlocal began
            started = time.perf_counter()
            changed = _shrunk(parameters, sample, store, context, micro_steps=2 if accumulates else 1)
            with _trainer(changed, Path(folder), context) as trainer:
                built = time.perf_counter()
                began = began or built
                trainer.one_step()  # the first step of a process or a shape is slower
                # the first model takes imports, too, which may come from a slow disk, and no other one does
                build = min(context.broadcast(built - started), seconds / 2)
                return Timed(time_steps(trainer, seconds=enough), build)

        return find_rate(
            time_sample, layers=layers, period=_period(parameters, store.facts.vocabulary), rows=rows,
            few_rows=rows if context.device.type == "cuda" else min(rows, FEW_ROWS), left=remaining,
        )  # fmt: skip


def find_rate(
    time_sample: Timer, *, layers: int, period: int, rows: int, few_rows: int, left: Callable[[], float]
) -> Probed | None:
    """Returns the rate of `layers` layers and `rows` rows from samples that `time_sample` times: as much of the model
    as the time that is `left` allows. None where one layer and `few_rows` leave no time for another sample.

    Args:
        period: the number of layers after which their kinds repeat.
        few_rows: rows of the first sample.
    """
    shallow = Sample(min(1, layers), few_rows)
    timed = time_sample(shallow, 0.0)

    def cost(sample: Sample) -> float:
        """Returns the seconds that it takes to time `sample`, from what `shallow` took: rather too many."""
        grown = _scale(timed.rate, sample.rows / shallow.rows)
        return timed.build + TIMED * max(1, sample.layers) * grown.step(1)

    wider, whole = Sample(shallow.layers, rows), Sample(layers, rows)
    deeper = Sample(1 + period, rows) if layers > 1 else wider
    while deeper.rows > few_rows and cost(wider) + cost(deeper) > left():
        fewer = max(few_rows, deeper.rows // 2)
        wider, deeper = replace(wider, rows=fewer), replace(deeper, rows=fewer)
    if cost(deeper) > left():
        return None
    if wider != shallow and cost(whole) > left():
        shallow, timed = wider, time_sample(wider, LONG_ENOUGH / 2)
    if cost(whole) <= left():
        return Probed(time_sample(whole, LONG_ENOUGH).rate, "the whole model")
    rate, said = timed.rate, f"{deeper.rows} of {rows} rows of a micro-batch"
    if layers > 1:
        while deeper.layers + period < layers and cost(replace(deeper, layers=deeper.layers + period)) <= left():
            deeper = replace(deeper, layers=deeper.layers + period)
        deep = time_sample(deeper, LONG_ENOUGH / 2).rate
        rate = _extrapolate(rate, deep, (layers - 1) / (deeper.layers - 1))
        said = f"models of 1 and {deeper.layers} of {layers} layers"
        if deeper.rows < rows:
            said = f"models of 1 and {deeper.layers} of {layers} layers, {deeper.rows} of {rows} rows of a micro-batch"
    return Probed(_scale(rate, rows / deeper.rows), said)


def _extrapolate(shallow: StepRate, deep: StepRate, factor: float) -> StepRate:
    """Returns the rate of a model that has `factor` times the layers that `deep` has more than `shallow`."""

    def line(one: float, other: float) -> float:
        return max(one, one + factor * (other - one))

    return StepRate(
        line(shallow.micro_step, deep.micro_step), line(shallow.update, deep.update),
        line(shallow.evaluation, deep.evaluation),
    )  # fmt: skip


def _scale(rate: StepRate, rows: float) -> StepRate:
    """Returns the rate with `rows` times the rows; the update does not depend on them."""
    return StepRate(rate.micro_step * rows, rate.update, rate.evaluation * rows)


def _period(parameters: Parameters, vocabulary: Vocabulary) -> int:
    """Returns after how many layers their kinds repeat: 3 where two of local attention follow one of global."""
    kinds = getattr(parameters.architecture.config(vocabulary), "layer_types", None) or ()
    return next((each for each in range(1, len(kinds)) if kinds[each:] == kinds[:-each]), 1)


def _write_store(folder: Path, parameters: Parameters, vocab_size: int) -> TokenStore:
    """Writes a store of random tokens whose documents are as long as half a row on average, in lines."""
    length, layout = parameters.data.sequence_length, parameters.objective.row_layout()
    vocabulary = synthetic_vocabulary(vocab_size, length)
    random = np.random.default_rng(0)
    ordinary = np.asarray(vocabulary.ordinary)
    documents: list[np.ndarray] = []
    while sum(map(len, documents)) < ROWS_IN_STORE * length:
        count = length if layout.kind in ONE_A_ROW else int(random.integers(max(8, length // 8), length))
        documents.append(random.choice(ordinary, count))
    lines = [np.array_split(each, 4) if layout.kind == "pairs" else [each] for each in documents]
    words = [[np.arange(len(line)) % 2 == 0 for line in document] for document in lines]
    return write_store(
        folder / "store", lines, vocabulary=vocabulary,
        unit="line" if layout.kind in ("lines", "pairs") else "document", word_starts=words,
        answers=words if layout.kind == "padded" else None,
    )  # fmt: skip


def _shrunk(
    parameters: Parameters, sample: Sample, store: TokenStore, context: DistributedContext, *, micro_steps: int
) -> Parameters:
    """Returns the parameters of a run of `sample` that writes nothing and never ends."""
    smaller = with_depth(parameters, sample.layers) if sample.layers else parameters
    assert smaller is not None, "layers are 0 where the depth cannot be changed"
    replicas = context.world_size // parameters.parallel.replica_size
    data = {
        "train": [{"store": str(store.folder), "weight": 1.0}],
        "validation": [],
        "split": None,
        "sequence_length": parameters.data.sequence_length,
    }
    changes: dict[str, Any] = {
        "data": data,
        "batch_size": {"-1": sample.rows * micro_steps * replicas},
        "micro_batch_size": sample.rows,
        "schedule": {"type": "constant"},
        "max_steps": 1_000_000,
        "max_tokens": None,
        "epochs": None,
        "phases": [],
        "checkpoint": {},
        "evaluation": None,
        "logging_steps": 1_000_000,
        "profile": None,
        "trackers": [],
        "events": {},
        "start_from": None,
    }
    return Parameters.from_dict({**smaller.dump(), **changes}, source="probe")


@contextmanager
def _trainer(parameters: Parameters, folder: Path, context: DistributedContext) -> Iterator[Trainer]:
    """Builds the trainer of `parameters`, without a word; its memory is free afterwards."""
    quiet = replace_level("terakoya", logging.ERROR)
    with quiet, determinism.restore_choice(), closing(RunLog(folder, (), {}, active=False)) as run_log:
        yield build_trainer(parameters, folder, Stores.open(parameters.data), context, run_log)
    free_memory(context)
