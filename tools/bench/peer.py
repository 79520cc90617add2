"""The peer: Transformers' own `Trainer`, with its defaults, timed step by step."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

Step = tuple[int, float, float]
"""Real tokens, wall seconds, CPU seconds of one optimizer step."""


class Sequences(torch.utils.data.Dataset):
    """Tokenised sequences in memory."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(self.sequences[index])}


def blocks(sequences: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """What `group_texts` of Transformers' examples makes: everything joined, cut every `length`, the rest dropped."""
    joined = [number for sequence in sequences for number in sequence]
    return [joined[start : start + length] for start in range(0, len(joined) - length + 1, length)]


class _Clock(TrainerCallback):
    def __init__(self, now: Callable[[], None]) -> None:
        self.now = now
        self.ended: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.now()
        self.ended.append((time.perf_counter(), time.process_time()))


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    batch_size: int,
    steps: int,
    seed: int,
    now: Callable[[], None] = lambda: None,
    **arguments: Any,
) -> list[Step]:
    """Trains a copy of `model` for 1 + `steps` steps with masks of 15 % and dynamic padding.

    `now` is called before a time is taken (a GPU waits for its kernels there); `arguments` are `TrainingArguments`.
    Returns the steps but the first, which warms up.
    """
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    tokens: list[int] = []

    def collate(examples: list[dict[str, Any]]) -> Mapping[str, torch.Tensor]:
        batch = masking(examples)
        tokens.append(int(batch["attention_mask"].sum()))
        return batch

    clock = _Clock(now)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=batch_size, max_steps=steps + 1, save_strategy="no", report_to="none",
            disable_tqdm=True, seed=seed, **arguments,
        )  # fmt: skip
        trainer = Trainer(
            copy.deepcopy(model), settings, collate, Sequences(sequences), processing_class=tokenizer, callbacks=[clock]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return differences(clock.ended, tokens)


def differences(ended: Sequence[tuple[float, float]], tokens: Sequence[int]) -> list[Step]:
    """Each step but the first, from the times at which steps ended and the tokens of each."""
    return [
        (tokens[number], after[0] - before[0], after[1] - before[1])
        for number, (before, after) in enumerate(pairwise(ended), start=1)
    ]
