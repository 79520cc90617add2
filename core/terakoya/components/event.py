"""Event plugins with settings: what they are, and the listeners that they start.

A plugin that needs no settings is a module with event hooks (see `terakoya.hookspecs`). One that has settings is a
component, which the parameter JSON names: `"events": {"early_stopping": {"patience": 3}}`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from terakoya.components.base import Component

if TYPE_CHECKING:
    from torch import Tensor

    from terakoya.components.run import Run, StepReport
    from terakoya.components.tensor_shard import TensorShard

Validations = Mapping[str, Mapping[str, float]]
"""The numbers of one validation: for each validation store its metrics by name; under "" those of event plugins."""


class SavedTensors(Mapping[str, "Tensor"]):
    """Tensors that an event plugin has in a checkpoint, by name: whole, on the CPU, each read when it is asked for."""

    @abstractmethod
    def at(self, shard: TensorShard) -> Tensor:
        """Returns the elements at the place of `shard` in the tensor of its name, as a tensor like `shard.value`, on
        the CPU. Other elements are not read where they are in other files."""


class EventListener:
    """What an event plugin does in one run, on one rank. A subclass overrides the events that it listens to; the rules
    of `terakoya.hookspecs` hold: every rank calls them, and none makes collective calls but `run.reduce`, in `evaluate`
    and, where `report.values` is there, in `step_finished`."""

    def run_started(self, run: Run) -> None:
        """Called once, before the first step; a resumed run has called `load` before."""

    def step_finished(self, run: Run, report: StepReport) -> None:
        """Called after each optimizer step."""

    def evaluate(self, run: Run) -> Mapping[str, float] | None:
        """Called whenever the run validates. Returns name -> number, equal on all ranks, or None."""

    def validation_finished(self, run: Run, values: Validations) -> None:
        """Called after each validation, with numbers that are equal on all ranks."""

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        """Called after a checkpoint has its final name."""

    def run_finished(self, run: Run, error: BaseException | None) -> None:
        """Called once when the run ends; `error` ended it early, else None. With a `RollingBack` the run goes back to a
        checkpoint, and another listener continues."""

    def state(self) -> Any:
        """Returns what the checkpoint of this moment must hold so that a resumed run continues exactly as this one, as
        a JSON value; None where there is nothing. That of rank 0 is saved."""

    def load(self, state: Any) -> None:
        """Restores, on every rank, what `state` returned on rank 0."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns what `state` cannot: the tensors by name that the checkpoint of this moment must hold. Called on rank
        0 alone; they are written or copied before the next step."""
        return {}

    def shards(self) -> Sequence[TensorShard]:
        """Returns such tensors of which each process has a part, for example one value for each element of
        `Run.weight_shards`. Called on every rank: together they return each element of a tensor once."""
        return ()

    def load_tensors(self, tensors: SavedTensors) -> None:
        """Restores, on every rank, what `tensors` and `shards` returned, on however many ranks. Called after `load`,
        and not at all for a checkpoint without such tensors, which the run tells."""


class EventPlugin(Component):
    """Something that happens at the events of a run, next to training: the settings of an `EventListener`.

    It never changes what is learned: a run takes the same steps, bit for bit, with and without it. It may end the run
    (`run.request_end`) and have it saved (`run.request_save`).
    """

    always: ClassVar[bool] = False
    """Whether every run has it, with its defaults, unless `"events": {"NAME": null}` switches it off."""

    def check(self, parameters: Any) -> None:
        """Raises UserError where these settings do not fit the `parameters` of the run. Looks at nothing else."""

    def count_bytes(self, trained: int) -> int:
        """Returns the bytes that its listener keeps for `trained` float32 weights: for all of them in each checkpoint,
        and on the device for those that rank 0 keeps, all or its part."""
        return 0

    def count_copies(self, steps: int) -> int:
        """Returns how many checkpoints its listener keeps, beside those of `checkpoint.keep`, in `steps` steps."""
        return 0

    def start(self, run: Run) -> EventListener:
        """Returns the listener of `run`. Called on every rank once the run is built, also in a dry run: what costs or
        writes anything belongs into `EventListener.run_started`."""
        raise NotImplementedError
