"""What the loop itself costs: CPU time of a step beyond a raw torch loop that does the same mathematics.

    python tools/bench/loop.py

A tiny BERT on small rows, one thread. The raw loop has its batches ready: forward, backward, clipping, fused AdamW.
terakoya does the same with every bundled plugin and tracker on, once with its batches ready too (the loop alone) and
once reading and masking its rows; the raw loop once more, accelerate and Transformers' `Trainer` stand beside it. They
take turns every ten steps, and what one adds is the median over turns of its difference from the raw loop's turn just
before: the machine's own moods last longer. A process keeps the luck of its start, as the second raw loop shows, so
all are started several times and the median counts. CPU time is that of all threads of the process. Exits with 1 above
the goal.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice, pairwise
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines
import numpy as np
import ours
import torch
from accelerate import Accelerator
from peer import ClockCallback
from step_clock import Clock
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from terakoya import plugins
from terakoya.config.parameters import Parameters
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import BatchMaker, StepBatches
from terakoya.training.model.build import build_module

GOAL = 0.5
ALONE, WHOLE, RAW = "terakoya, batches ready", "terakoya, whole", "raw torch loop"
READY = 32
LEG = 10
"""Steps that a contestant takes before the next one's turn: as many as from one logged step to the next."""
WARM_UP = 8
"""Legs that are not counted."""


def main() -> int:
    """Prints milliseconds a step and what each adds to the raw loop. Returns the exit status."""
    arguments = _arguments()
    contestants: dict[str, Runner] = {
        RAW: run_raw,
        ALONE: run_ready,
        WHOLE: run_whole,
        "raw torch loop again": run_raw,
        "accelerate": run_accelerate,
        "Transformers' Trainer": run_trainer,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = lines.drawn(folder / "tokenizer", count=4000, mean_length=20, sequence_length=32, vocabulary_size=1000)
        raw = parameters(data.store(folder / "store"))
        starts = [relay(contestants, raw, arguments.legs) for _ in range(arguments.starts)]
    for name in contestants:
        took = statistics.median(statistics.median(legs[name]) for legs in starts)
        added = [
            statistics.median(each - base for each, base in zip(legs[name], legs[RAW], strict=True)) for legs in starts
        ]
        print(
            f"{name:24} {took:6.3f} ms a step, {statistics.median(added):+.3f} ms, "
            f"by start {min(added):+.3f} to {max(added):+.3f}" + (f" (goal {GOAL})" if name == ALONE else "")
        )
        if name == ALONE:
            failed = statistics.median(added) > GOAL
    return int(failed)


class Relay(Clock):
    """A clock that lets a contestant run for one leg, then waits for its next turn."""

    def __init__(self, legs: int, mine: Semaphore, following: Semaphore) -> None:
        super().__init__(warm_up=WARM_UP, steps=legs)
        self.mine, self.following = mine, following
        self.count = 0
        self.cpu: list[float] = []

    @property
    def steps(self) -> int:
        """Steps to take: the first waits for the start, and two more legs end when others have stopped already."""
        return 1 + LEG * (self.last + 2)

    def step_ended(self) -> None:
        """At the end of a leg notes the CPU time so far, waiting included: threads may have worked meanwhile."""
        if self.count % LEG == 0:
            if self.count:
                self.cpu.append(time.process_time())
                self.following.release()
            if self.count + 1 < self.steps:
                self.mine.acquire()
        self.count += 1

    def milliseconds(self) -> list[float]:
        """CPU milliseconds a step, of each leg that counts."""
        counted = self.cpu[self.warm_up : self.last + 1]
        return [1000 * (after - before) / LEG for before, after in pairwise(counted)]


Runner = Callable[[Mapping[str, Any], Relay], None]
"""Trains with the parameters for `relay.steps` steps and tells `relay` when each ends."""


def relay(contestants: Mapping[str, Runner], raw: Mapping[str, Any], legs: int) -> dict[str, list[float]]:
    """Runs the contestants leg by leg, each in a process of its own. Returns their CPU milliseconds a step by leg."""
    context = multiprocessing.get_context("spawn")
    turns = [context.Semaphore(int(number == 0)) for number in range(len(contestants))]
    results = [context.SimpleQueue() for _ in contestants]
    processes = []
    for number, runner in enumerate(contestants.values()):
        following = turns[(number + 1) % len(turns)]
        processes.append(
            context.Process(target=_contest, args=(runner, raw, legs, turns[number], following, results[number]))
        )
        processes[-1].start()
    try:
        while any(result.empty() for result in results):
            if any(process.exitcode for process in processes):
                raise RuntimeError("a contestant failed; what it said stands above")
            time.sleep(0.5)
        return {name: result.get() for name, result in zip(contestants, results, strict=True)}
    finally:
        for process in processes:
            process.kill()


def _contest(
    runner: Runner,
    raw: Mapping[str, Any],
    legs: int,
    mine: Semaphore,
    following: Semaphore,
    result: multiprocessing.queues.SimpleQueue,
) -> None:
    torch.set_num_threads(1)
    clock = Relay(legs, mine, following)
    runner(raw, clock)
    result.put(clock.milliseconds())


def parameters(store: TokenStore) -> dict[str, Any]:
    """A tiny run with every tracker there is."""
    return {
        "data": {"train": [{"store": str(store.folder)}], "sequence_length": 32},
        "architecture": {
            "type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        "objective": {"type": "masked_lm"},
        "optimizer": {"type": "adamw", "learning_rate": 1e-4, "weight_decay": 0.01},
        "schedule": {"type": "linear", "warmup_steps": 10},
        "precision": "fp32",
        "batch_size": {"-1": 4},
        "max_steps": 1,
        "checkpoint": {"model": "never", "save_steps": 1_000_000},
        "trackers": [{"type": name} for name in plugins.registry().names("trackers")],
    }  # fmt: skip


def run_whole(raw: Mapping[str, Any], clock: Relay) -> None:
    """terakoya as it is."""
    ours.run(raw, clock.steps, clock)


def run_ready(raw: Mapping[str, Any], clock: Clock, folder: Path | None = None) -> None:
    """terakoya, each of the first batches made once and used again and again; in `folder`, if there is one."""
    made: dict[int, StepBatches] = {}
    make: Callable[[BatchMaker, int], StepBatches] = BatchMaker.__call__

    def ready(self: BatchMaker, step: int) -> StepBatches:
        step %= READY
        if step not in made:
            made[step] = make(self, step)
        return made[step]

    BatchMaker.__call__ = ready  # type: ignore[method-assign]
    ours.run(raw, clock.steps, clock, folder)


def run_raw(raw: Mapping[str, Any], clock: Relay) -> None:
    """torch and nothing else."""
    module, optimizer, batches = _prepared(raw)
    for batch, masked in islice(cycle(batches), clock.steps):
        loss = module(batch)["mlm_loss"] / masked
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()


def run_accelerate(raw: Mapping[str, Any], clock: Relay) -> None:
    """The loop of accelerate's introduction."""
    module, optimizer, batches = _prepared(raw)
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(_Ready(batches, clock.steps), batch_size=None)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    for batch in loader:
        masked = batch.pop("masked")
        loss = module(batch)["mlm_loss"] / masked
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()


def run_trainer(raw: Mapping[str, Any], clock: Relay) -> None:
    """Transformers' `Trainer` with its defaults."""
    module, _optimizer, batches = _prepared(raw)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=clock.steps, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(
            _WithLoss(module), settings, lambda examples: examples[0], _Ready(batches, clock.steps),
            callbacks=[ClockCallback(clock)],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class _WithLoss(nn.Module):
    """What `Trainer` expects: keyword arguments in, a loss out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, masked: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.module(batch)["mlm_loss"] / masked}


class _Ready(torch.utils.data.Dataset):
    """The ready batches, again and again, `length` in all."""

    def __init__(self, batches: list[tuple[dict[str, Tensor], int]], length: int) -> None:
        self.batches = [{**batch, "masked": torch.tensor(masked)} for batch, masked in batches]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(self.batches[index % len(self.batches)])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[index] for index in range(self.length))


def _prepared(
    raw: Mapping[str, Any],
) -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[dict[str, Tensor], int]]]:
    """The module and optimizer of our run, and its first batches with how many tokens each masks."""
    settings = Parameters.from_dict(raw, source="loop.py")
    store = TokenStore.open(settings.data.train[0].store)
    vocabulary = store.facts.vocabulary
    module = build_module(settings, vocabulary)
    attention.use(module, "sdpa")
    module.train()
    source = RowSource(store, settings.objective.row_layout(), sequence_length=32, seed=0)
    rows = settings.batch_size["-1"]
    made = [
        settings.objective.collate(source.load(0, np.arange(rows) + number * rows), vocabulary)
        for number in range(READY)
    ]
    batches = [
        ({name: torch.from_numpy(array) for name, array in batch.arrays.items()}, batch.counts["masked"])
        for batch in made
    ]
    return module, settings.optimizer.build(module, fused=True), batches


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--legs", type=int, default=30, help=f"timed legs of {LEG} steps")
    parser.add_argument("--starts", type=int, default=5, help="how often everything is started anew")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
