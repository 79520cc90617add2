"""The gradients of one optimizer step, added up over its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from terakoya.toolkit.random_keys import torch_seed
from terakoya.training.batches import BatchMaker, StepBatches
from terakoya.training.device_copies import CopyAhead
from terakoya.training.engines.compared_examples import compare_examples
from terakoya.training.engines.engine import Engine
from terakoya.training.loss import weighted_loss
from terakoya.training.run import Run
from terakoya.training.step_clock import StepClock
from terakoya.training.watches import StepTimer, find_watch

DROPOUT = "dropout"
"""Distinguishes the random keys of dropout from all others."""


class MicroSteps:
    """Takes the micro-steps of each step of `run`.

    Attributes:
        read_step: the micro-batches of a step, copied to the device ahead of it.
        terms: the terms of the loss, by name.
        profile: times the parts of steps.
    """

    def __init__(self, run: Run, batches: BatchMaker, clock: StepClock) -> None:
        self.read_step = CopyAhead(batches, batches.to_device, run.device)
        self.terms = run.objective.terms()
        self.profile = find_watch("profile", run, batches, StepTimer)
        self._run, self._batches, self._clock = run, batches, clock

    def take(
        self, engine: Engine, batches: StepBatches, counts: Mapping[str, int], number: int
    ) -> Iterator[Mapping[str, Tensor]]:
        """Adds up the gradients of `number` micro-steps, losses normalised by the global `counts`; yields the sums of
        each micro-batch of `batches`. Dummies come first: the last micro-step may bring the sums of all."""
        micro_steps = range(len(batches.real) - number, len(batches.real))
        compared: dict[int, dict[str, Tensor]] = {}
        if self._run.objective.compares_examples:
            loads = {each: partial(self._begin, engine, batches, each) for each in micro_steps}
            compared = compare_examples(engine, self._run.context, self._run.objective, loads)
        for micro_step in micro_steps:
            is_real = micro_step >= 0
            loss_fn = partial(weighted_loss, terms=self.terms, counts=counts, factor=float(is_real))
            with self.profile.part("data"):
                tensors = self._begin(engine, batches, micro_step) | compared.get(micro_step, {})
            last = micro_step == len(batches.real) - 1
            until_loss = self._clock.until_loss(loss_fn) if last else loss_fn
            with self.profile.forward_and_backward(until_loss) as timed:
                sums = engine.micro_step(tensors, timed, last=last)
            if is_real:
                yield sums

    def _begin(self, engine: Engine, batches: StepBatches, micro_step: int) -> dict[str, Tensor]:
        """Seeds dropout for a micro-step and returns its tensors on the device; those of the dummy below 0."""
        run = self._run
        # a seed for each step, micro-step and process or replica: no generator's state is saved
        seed_dropout(run.device, torch_seed(run.parameters.seed, DROPOUT, run.step, micro_step, engine.dropout_rank))
        if 0 <= micro_step < len(batches.copies):
            return batches.copies[micro_step].take()
        batch = batches.real[micro_step] if micro_step >= 0 else batches.dummy
        assert batch is not None
        return self._batches.to_device(batch, run.device)


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seeds the generator that dropout on `device` draws from.

    torch.manual_seed would also format the caller's stack for each kind of device that is missing, which takes half a
    millisecond per step.
    """
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    generator.manual_seed(seed)
