"""What plugins watch of the steps of a run, by a key of the parameters that the core has no code for: `profile` times
them, `spikes` judges them (`hookspecs.register_watches`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.plugins.families import missing_family
from terakoya.training.batches import BatchMaker
from terakoya.training.run import Run

if TYPE_CHECKING:
    from terakoya.training.step_health import PendingStep, StepHealth

LossFn = Callable[[Mapping[str, Tensor]], Tensor]
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


class StepJudge:
    """Judges the steps of a run in their order, a function of their losses and norms alone; this one finds nothing.

    Attributes:
        goes_back: whether it may raise `DecidedRollback`.
    """

    goes_back = False

    def skip_above(self, step: int) -> float:
        """Returns the gradient norm above which the update of the coming `step` is left out."""
        return math.inf

    def judge(self, health: StepHealth, step: PendingStep, loss: float) -> None:
        """Judges a `step` by its global `loss` and its norm, which may not be finite; notes by `health` what it finds.

        Raises:
            DecidedRollback: the run goes back.
        """

    def first_open_step(self) -> int | None:
        """Returns the first step because of which the run may go back, among those that were judged."""
        return None

    def state(self) -> Any:
        """Returns the whole state, as JSON values."""

    def load(self, state: Any) -> None:
        """Restores a `state` that is not None."""


def find_watch(key: str, run: Run, batches: BatchMaker, without: Callable[[], Watch]) -> Watch:
    """Returns what watches the steps of `run` by `key`, or what `without` returns, where the parameters do not ask for
    it.

    Raises:
        UserError: no plugin has it, and the user has asked for it.
    """
    settings, found = getattr(run.parameters, key), registry().watches.get(key)
    if settings is None:
        return without()
    if found is not None:
        watch: Watch = found[0](run, batches)
        return watch
    if settings == type(run.parameters).model_fields[key].default:
        return without()
    raise UserError(f"{key}: no plugin has what this key asks for{missing_family('keys', key)}")
