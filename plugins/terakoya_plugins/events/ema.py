"""Keeps an exponential moving average of the weights next to training: `terakoya export RUN --weights ema`.

After each step, average = decay x average + (1 - decay) x weights (Polyak and Juditsky, 1992). The first averages
forget faster, at most (1 + n) / (10 + n) in the nth update, as those of TensorFlow's ExponentialMovingAverage do, so
that weights from before training do not linger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin
from terakoya.components.run import Run, StepReport
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Ema(EventPlugin):
    """Keeps an exponential moving average of the weights, on rank 0 and in its checkpoints; `terakoya export RUN
    --weights ema` writes it as a model."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """The share of the average that stays in each update; 0.999 looks back about 1,000 updates."""
    every: PositiveInt = 1
    """Steps between two updates of the average. Unit: optimizer steps."""
    from_step: NonNegativeInt = 0
    """The step after which the average begins, with the weights of that step. Unit: optimizer steps."""
    warmup: bool = True
    """Whether the first updates forget faster: the decay of the nth is at most (1 + n) / (10 + n)."""

    def check(self, parameters: Any) -> None:
        """Raises UserError where no process holds the whole float32 weights."""
        parallel = parameters.parallel
        if parallel.engine != "ddp" or parallel.tp_size > 1 or parallel.pp_size > 1:
            raise UserError(
                'decay: an average of weights needs a process that holds all of them: parallel.engine "ddp", without '
                f"tensor or pipeline parallelism; got {parallel.describe()}. Average checkpoints afterwards instead: "
                "terakoya average RUN --last 5"
            )

    def count_bytes(self, trained: int) -> int:
        """Returns the bytes of the averages: float32, as the weights are."""
        return 4 * trained

    def start(self, run: Run) -> EventListener:
        """Returns the listener."""
        return _Listener(self, run)


class _Listener(EventListener):
    """The average on rank 0.

    Attributes:
        averages: by the names of the weights that are trained; empty before `from_step`, and on other ranks.
        updates: how often they were updated.
    """

    def __init__(self, settings: Ema, run: Run) -> None:
        self.settings = settings
        self.run = run
        self.updates = 0
        self.averages: dict[str, Tensor] = {}
        trained = run.module.named_parameters() if run.rank == 0 else ()
        self.weights = {name: weight for name, weight in trained if weight.requires_grad}

    def run_started(self, run: Run) -> None:
        self._begin(run.step)

    def step_finished(self, run: Run, report: StepReport) -> None:
        import torch

        if not self.averages:
            self._begin(report.step)
        elif report.step % self.settings.every == 0:
            self.updates += 1
            decay = self.settings.decay
            if self.settings.warmup:
                decay = min(decay, (1 + self.updates) / (10 + self.updates))
            with torch.no_grad():
                weights = [weight.detach() for weight in self.weights.values()]
                torch._foreach_lerp_(list(self.averages.values()), weights, 1.0 - decay)

    def _begin(self, step: int) -> None:
        """Begins the average with the weights of `step`, unless there is one, or `step` is before its first."""
        if not self.averages and step >= self.settings.from_step:
            self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def state(self) -> Any:
        return {"updates": self.updates}

    def load(self, state: Any) -> None:
        self.updates = state["updates"]

    def tensors(self) -> Mapping[str, Tensor]:
        return self.averages

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        new = [name for name in self.weights if name not in tensors]
        if new:
            self.run.warn(f"ema: {', '.join(new[:3])} was not trained before; its average begins with its value now")
        self.averages = {
            name: tensors[name].to(weight.device, copy=True) if name in tensors else weight.detach().clone()
            for name, weight in self.weights.items()
        }


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    """Registers `ema`."""
    return {"ema": Ema}
