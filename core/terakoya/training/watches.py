"""What plugins watch of the steps of a run, by a key of the parameters that the core has no code for: `profile` times
them, `spikes` judges them (`hookspecs.register_watches`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.batches import BatchMaker
from terakoya.training.engines.engine import LossFn
from terakoya.training.run import Run

Watch = TypeVar("Watch")


class StepTimer:
    """Times the parts of steps; this one does not."""

    def begin(self, step: int) -> None:
        """Called before the rows of `step`, counted from 1, are taken; maybe while the step before it ends."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Is open while a part of the step runs: `data` or `update`."""
        return nullcontext()

    def forward_and_backward(self, loss_fn: LossFn) -> AbstractContextManager[LossFn]:
        """Is open while both run; yields what stands for `loss_fn`, which is called between them."""
        return nullcontext(loss_fn)

    def end(self, step: int) -> None:
        """Called after `step`; may be collective."""

    def finish(self, step: int) -> None:
        """Called after the last step; may be collective."""


def find_watch(key: str, run: Run, batches: BatchMaker, without: Callable[[], Watch]) -> Watch:
    """Returns what watches the steps of `run` by `key`, or what `without` returns, where the parameters do not ask for
    it. Raises UserError if no plugin has it and the user has asked for it."""
    settings, found = getattr(run.parameters, key), registry().watches.get(key)
    if settings is None:
        return without()
    if found is not None:
        watch: Watch = found[0](run, batches)
        return watch
    if settings == type(run.parameters).model_fields[key].default:
        return without()
    raise UserError(f"{key}: no plugin has what this key asks for{registry().missing('keys', key)}")
