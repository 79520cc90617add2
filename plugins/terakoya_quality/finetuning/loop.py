"""Trains a model with a head, and computes its logits: the same seed gives the same numbers to the bit on a CPU.

Gradients are clipped to 1; by default with AdamW, a linear warm-up and a linear way down to 0, as in the scripts of
BERT and GLUE.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from terakoya.components import Progress
from terakoya.errors import UserError
from terakoya.training.batches import copy_to_device
from terakoya_quality.finetuning.settings import TuningSettings
from terakoya_quality.finetuning.task import Feature, Inputs, Task

LARGEST_GRADIENT = 1.0
READ_TOGETHER = 50
"""Steps whose losses and gradients are checked at once: reading them waits for the device."""


def pad_inputs(rows: Sequence[Inputs], model: PreTrainedModel, pad: int) -> dict[str, Tensor]:
    """Returns those of the inputs that `model` takes, as tensors (rows, T) on its device, padded to the longest."""
    accepted = {*inspect.signature(model.forward).parameters, "input_ids", "attention_mask"}
    if getattr(model.config, "type_vocab_size", 2) < 2:
        accepted.discard("token_type_ids")
    length = max(len(row["input_ids"]) for row in rows)
    tensors: dict[str, Tensor] = {}
    for name in accepted & rows[0].keys():
        padded = np.full((len(rows), length), pad if name == "input_ids" else 0, np.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row[name])] = row[name]
        tensors[name] = copy_to_device(torch.from_numpy(padded), model.device)
    return tensors


class Batches:
    """A model with a head, and the id `pad` that fills up short inputs, which the attention mask hides."""

    def __init__(self, model: PreTrainedModel, task: Task[Any], *, pad: int, precision: str) -> None:
        self.model, self.task, self.pad, self.precision = model, task, pad, precision
        self.with_choices = type(model).__name__.endswith("ForMultipleChoice")

    def logits(self, features: Sequence[Feature]) -> Tensor:
        """Returns the model's logits (B, ...) of `features`, padded to the longest."""
        choices = len(features[0].inputs)
        tensors = pad_inputs([row for feature in features for row in feature.inputs], self.model, self.pad)
        if self.with_choices:
            tensors = {name: each.view(len(features), choices, -1) for name, each in tensors.items()}
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.task.logits(self.model(**tensors), choices)


def train(
    batches: Batches,
    features: Sequence[Feature],
    settings: TuningSettings,
    *,
    learning_rate: float,
    epochs: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> bool:
    """Trains the model of `batches` on `features`; returns False if a loss or a gradient was not finite, soon after
    which it stops.

    Args:
        seed: decides the order of the features and dropout.
        progress: receives the steps done and the steps in all.

    Raises:
        UserError: the loss or the gradient was not finite before the first step, where no learning rate is to blame.
    """
    model, task = batches.model, batches.task
    size = settings.batch_size
    total = epochs * math.ceil(len(features) / size)
    optimizer = settings.make_optimizer(learning_rate).build(model, fused=model.device.type == "cuda")
    schedule = _schedule(optimizer, settings, total)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model.train()
    done, checked = 0, list[Tensor]()
    for _ in range(epochs):
        shuffled = torch.randperm(len(features), generator=order).tolist()
        for first in range(0, len(features), size):
            chosen = [features[number] for number in shuffled[first : first + size]]
            loss = task.loss(batches.logits(chosen), copy_to_device(task.stack_targets(chosen), model.device))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            checked.append(torch.stack([loss.detach().float(), norm.float()]))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if len(checked) == READ_TOGETHER or done == total:
                if not bool(torch.stack(checked).isfinite().all()):
                    if done <= READ_TOGETHER:
                        _check_untrained(checked[0], batches)
                    return False
                checked.clear()
            progress(done, total)
    return True


def _schedule(optimizer: Optimizer, settings: TuningSettings, total: int) -> LambdaLR:
    """Returns the schedule of `optimizer`, which has its peak rate, over `total` steps."""
    if (chosen := settings.make_schedule()) is None:
        warmup = math.ceil(total * settings.warmup_ratio)  # Transformers' own imports peft and, if there, bitsandbytes
        decay = max(1, total - warmup)
        return LambdaLR(optimizer, lambda step: step / warmup if step < warmup else max(0.0, (total - step) / decay))
    start = Progress(step=0, max_steps=total, learning_rate=optimizer.param_groups[0]["lr"])
    chosen.check(start)
    return LambdaLR(optimizer, lambda step: chosen.factor(replace(start, step=step)))


def _check_untrained(first: Tensor, batches: Batches) -> None:
    loss, norm = first.tolist()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"before anything was trained, the loss is {loss:g} and its gradient's norm {norm:g} ({batches.precision}, "
            f"{batches.model.device.type}): that is no matter of the learning rate. `terakoya verify MODEL` tells "
            "whether its weights are finite; another --precision or --device, whether a kernel is to blame"
        )


@torch.no_grad()
def predict(batches: Batches, features: Sequence[Feature], *, batch_size: int) -> list[np.ndarray]:
    """Returns the logits of each of `features`, without padding, in their order; longest ones are computed first."""
    batches.model.eval()
    lengths = [max(len(row["input_ids"]) for row in feature.inputs) for feature in features]

    def compute(numbers: Sequence[int]) -> list[np.ndarray]:
        logits = batches.logits([features[number] for number in numbers]).float().cpu().numpy()
        return [each[: lengths[n]] if features[n].spans else each for n, each in zip(numbers, logits, strict=True)]

    return longest_first(lengths, batch_size, compute)


def longest_first(
    lengths: Sequence[int], batch_size: int, compute: Callable[[Sequence[int]], Iterable[np.ndarray]]
) -> list[np.ndarray]:
    """Returns what `compute` gives for the numbers of a batch, in the order of `lengths`; long ones come first."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    found: dict[int, np.ndarray] = {}
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        found.update(zip(numbers, compute(numbers), strict=True))
    return [found[number] for number in range(len(lengths))]
