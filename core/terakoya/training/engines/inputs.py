"""What an engine of a plugin is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from terakoya.components import ModuleBuild
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.toolkit.deferred_tensors import DeferredTensors
from terakoya.training.engines.loss_scaling import LossScaler


@dataclass(frozen=True)
class EngineInputs:
    """What each process of a run builds its engine from (`hookspecs.register_engines`).

    Attributes:
        module: the root module, whose weights are initialised and equal on every process, or have no values where
            `deferred` has them.
        micro_steps, micro_batch_size: the most micro-steps of a step, and the most rows of a micro-step.
        scaler: scales losses in fp16; None in every other precision.
        learning_rate_shares: name of a parameter -> its learning rate, as a multiple of the step's; 1 where it has
            none.
        deferred: computes the weights, one at a time; None where every process has built them all.
        run: what transforms of the module are given.
    """

    parameters: Parameters
    module: nn.Module
    vocabulary: Vocabulary
    context: DistributedContext
    micro_steps: int
    micro_batch_size: int
    scaler: LossScaler | None
    learning_rate_shares: Mapping[str, float]
    deferred: DeferredTensors | None
    run: ModuleBuild
