"""What changes the module of a run between its building and its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from terakoya.components.architecture import Architecture
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from torch import nn

Stage = Literal["freeze", "adapt", "precision", "engine", "compile"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Where a module stands when it is changed, in their order. In each the core's own transforms come first, then those of
plugins by their names.

- `freeze`: it is built, with randomly initialised weights, or with shapes alone. `frozen_layers`.
- `adapt`: it has the weights with which the run begins, those of `start_from` on rank 0. What is trained beside
  these.
- `precision`: it is whole, on the host, and nothing has its parameters yet: the engine and the optimizer are built of
  what it is afterwards. Products of fewer bits.
- `engine`: the engine `ddp` has it, whole, on its device, with the same weights in every process. Layers that read
  copies of their weights. An engine that gathers weights for each use has it before it takes its parts of them; others,
  which have parts of it, leave this stage out.
- `compile`: whatever engine has it, it is as it is called. `compile`, `cuda_graphs`."""


@dataclass(frozen=True)
class ModuleBuild:
    """The run whose module is changed.

    Attributes:
        parameters: a `config.parameters.Parameters`.
        context: this process and the others, a `distributed.context.DistributedContext`; None where nothing is
            trained.
        compiled: what runs compiled: nothing ("off"), each block ("blocks") or the root module ("whole").
        cuda_graphs: whether that is recorded as CUDA graphs.
        warn: shows a sentence, and records it in the run.
        on_host: is open while a transform allocates memory of the host in the place of the device's.
        gathers: whether the engine gathers weights for each use, and calls `Copies.follow`: there is nothing to copy.
    """

    parameters: Any
    vocabulary: Vocabulary
    context: Any = None
    compiled: Literal["off", "blocks", "whole"] = "off"
    cuda_graphs: bool = False
    warn: Callable[[str], None] = lambda text: None
    on_host: Callable[[], AbstractContextManager[None]] = nullcontext
    gathers: bool = False

    @property
    def architectures(self) -> Sequence[Architecture]:
        """Those of the run's models."""
        architectures: Sequence[Architecture] = self.parameters.objective.architectures(self.parameters.architecture)
        return architectures


class Copies(Protocol):
    """Copies of weights that layers read in the place of the weights."""

    @property
    def copies(self) -> Sequence[torch.Tensor]:
        """They, on the module's device."""

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """The parameters that have one, or that layers read in bf16 where an engine gathers them."""

    def follow(self, group: nn.Module, *, is_block: bool) -> None:
        """Has the layers of `group`, whose weights an engine gathers before each forward of it, read what is there, and
        return float32 gradients for it; called once, after the engine's own hooks are there. In a block that is
        compiled the weights themselves have no values for others."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What records of the run say of them, as JSON."""

    def refresh(self) -> None:
        """Makes the copies again, after weights were changed."""

    def add_in_products(self, module: nn.Module) -> Sequence[nn.Parameter]:
        """Has layers of `module` add gradients to those of the micro-steps before, as they are computed; returns the
        parameters whose gradients must be there for it."""


@dataclass(frozen=True)
class ModuleTransform:
    """One change of the module, in place.

    Attributes:
        stage: when it takes place, see `STAGES`.
        is_wanted: whether a run with these parameters has it.
        apply: changes the module; in the stage `engine` it may return the copies that the engine keeps up to date.
            Raises UserError where it cannot.
        find_conflicts: yields what does not go together in the parameters of a run that wants it, a sentence each, with
            what to do.
        check: raises UserError where the device of a run that wants it cannot have it; called before anything is built.
    """

    stage: Stage
    is_wanted: Callable[[Any], bool]
    apply: Callable[[nn.Module, ModuleBuild], Copies | None]
    find_conflicts: Callable[[Any], Iterable[str]] = lambda parameters: ()
    check: Callable[[torch.device], None] = lambda device: None
