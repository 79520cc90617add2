"""What the loop itself costs: CPU time of a step beyond a raw torch loop that does the same mathematics.

    python tools/bench/loop.py

A tiny BERT on small rows, one thread. The raw loop has its batches ready: forward, backward, clipping, fused AdamW.
terakoya does the same with every bundled plugin and tracker on, once with its batches ready too (the loop alone) and
once reading and masking its rows; accelerate and Transformers' `Trainer` stand beside it. CPU time is that of all
threads of the process. Exits with 1 above the goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines
import numpy as np
import ours
import torch
import turns
from accelerate import Accelerator
from peer import ClockCallback
from step_clock import Clock
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments
from turns import Step, Turn

from terakoya import attention, plugins
from terakoya.data.rows import RowSource
from terakoya.data.store import TokenStore
from terakoya.parameters import Parameters
from terakoya.training.batches import BatchMaker, StepBatches
from terakoya.training.setup import build_module

GOAL = 0.5
ALONE, WHOLE, RAW = "terakoya, batches ready", "terakoya, whole", "raw torch loop"
READY = 32
WARM_UP = 2 * READY


def main() -> int:
    """Prints milliseconds a step and what each adds to the raw loop. Returns the exit status."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = lines.drawn(folder / "tokenizer", count=4000, mean_length=20, sequence_length=32, vocabulary_size=1000)
        raw = parameters(data.store(folder / "store"))
        contestants: dict[str, turns.Contestant] = {
            RAW: partial(train_raw, raw=raw, steps=arguments.steps),
            ALONE: partial(train_ready, raw=raw, steps=arguments.steps),
            WHOLE: partial(ours.train, raw=raw, steps=arguments.steps, warm_up=WARM_UP),
            "accelerate": partial(train_accelerate, raw=raw, steps=arguments.steps),
            "Transformers' Trainer": partial(train_trainer, raw=raw, steps=arguments.steps),
        }
        milliseconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _, name, turn in turns.interleave(contestants, arguments.rounds):
            milliseconds[name].append(1000 * typical([step.cpu for step in turn.steps]))
    medians = {name: statistics.median(values) for name, values in milliseconds.items()}
    for name, values in milliseconds.items():
        added = statistics.median(each - base for each, base in zip(values, milliseconds[RAW], strict=True))
        print(
            f"{name:24} {medians[name]:6.3f} ms a step ({min(values):.3f} to {max(values):.3f})"
            + ("" if name == RAW else f", {added:+.3f} ms" + (f" (goal {GOAL})" if name == ALONE else ""))
        )
    return int(medians[ALONE] - medians[RAW] > GOAL)


def typical(seconds: list[float]) -> float:
    """The mean over the ten steps between two logged ones, each taken as its median over the round: what else runs on
    the machine disturbs single steps, and what is done every tenth step counts with a tenth."""
    return statistics.fmean(statistics.median(seconds[phase::10]) for phase in range(10))


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
        "batch_size": {"-1": 4},
        "max_steps": 1,
        "checkpoint": {"model": "never", "save_steps": 1_000_000},
        "trackers": [{"type": name} for name in plugins.registry().names("trackers")],
    }  # fmt: skip


def train_ready(number: int, raw: Mapping[str, Any], *, steps: int) -> Turn:
    """terakoya, each of the first batches made once and used again and again."""
    made: dict[int, StepBatches] = {}
    make: Callable[[BatchMaker, int], StepBatches] = BatchMaker.__call__

    def ready(self: BatchMaker, step: int) -> StepBatches:
        step %= READY
        if step not in made:
            made[step] = make(self, step)
        return made[step]

    BatchMaker.__call__ = ready  # type: ignore[method-assign]
    try:
        return ours.train(number, raw, steps=steps, warm_up=WARM_UP)
    finally:
        BatchMaker.__call__ = make  # type: ignore[method-assign]


def train_raw(_: int, raw: Mapping[str, Any], *, steps: int) -> Turn:
    """torch and nothing else."""
    module, optimizer, batches = _prepared(raw)
    clock = Clock(warm_up=WARM_UP, steps=steps)
    for batch, masked in islice(cycle(batches), WARM_UP + steps):
        loss = module(batch)["mlm_loss"] / masked
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()
    return _turn(clock)


def train_accelerate(_: int, raw: Mapping[str, Any], *, steps: int) -> Turn:
    """The loop of accelerate's introduction."""
    module, optimizer, batches = _prepared(raw)
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(_Ready(batches, WARM_UP + steps), batch_size=None)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    clock = Clock(warm_up=WARM_UP, steps=steps)
    for batch in loader:
        masked = batch.pop("masked")
        loss = module(batch)["mlm_loss"] / masked
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()
    return _turn(clock)


def train_trainer(_: int, raw: Mapping[str, Any], *, steps: int) -> Turn:
    """Transformers' `Trainer` with its defaults."""
    module, _optimizer, batches = _prepared(raw)
    clock = Clock(warm_up=WARM_UP, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=WARM_UP + steps, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(
            _WithLoss(module), settings, lambda examples: examples[0], _Ready(batches, WARM_UP + steps),
            callbacks=[ClockCallback(clock)],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return _turn(clock)


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
    torch.set_num_threads(1)
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


def _turn(clock: Clock) -> Turn:
    return Turn([Step(0, *seconds) for seconds in clock.differences()], {})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
