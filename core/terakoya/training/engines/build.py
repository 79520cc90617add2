"""Builds the engine of a run over its module, whose weights are initialised and equal on every process."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from terakoya.components import ModuleBuild
from terakoya.config.loss_scaling import LossScaling
from terakoya.config.parallel import Parallel
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.cpu_allocator import returning_freed_memory
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.plugins.engines import GIVEN_WHOLE, plugin_engine
from terakoya.toolkit.deferred_tensors import DeferredTensors
from terakoya.training.engines.ddp import DDPEngine, StepOptions
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.inputs import EngineInputs
from terakoya.training.engines.learning_rates import build_optimizer
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.model.mup import find_scales
from terakoya.training.model.transforms import transform


@returning_freed_memory()
def build(
    module: nn.Module,
    run: ModuleBuild,
    *,
    micro_steps: int,
    micro_batch_size: int,
    deferred: DeferredTensors | None = None,
) -> Engine:
    """Returns the engine of `run` over `module`, with its optimizer, after the transforms of the stage `precision`, and
    those of `engine`. `deferred` has the weights where each process `holds_parts` and none has built them all. Raises
    UserError if engine, architecture and optimizer are incompatible, or no plugin has the engine."""
    parameters, vocabulary, context = run.parameters, run.vocabulary, run.context
    parallel = parameters.parallel
    assert parameters.precision != "auto", "the start of a run settles it"
    transform("precision", module, run)
    shares = {name: scale.rate for name, scale in find_scales(parameters, module, vocabulary).items()}
    scaler = None
    if parameters.precision == "fp16":
        scaler = LossScaler(parameters.loss_scaling or LossScaling(), context.device)
    inputs = EngineInputs(
        parameters, module, vocabulary, context, micro_steps, micro_batch_size, scaler=scaler,
        learning_rate_shares=shares, deferred=deferred, run=run,
    )  # fmt: skip
    build_engine = find_plugin_engine(parallel, processes=context.world_size)
    if build_engine is not None:
        return build_engine(inputs)
    module.to(context.device)
    optimizer = build_optimizer(parameters.optimizer, module, shares, fused=context.device.type in ("cpu", "cuda"))
    options = StepOptions(
        parameters.precision, parameters.max_grad_norm, scaler, micro_steps, run.cuda_graphs,
        recomputes=parameters.activation_checkpointing is not None,
    )  # fmt: skip
    engine = DDPEngine(context, module, optimizer, options)
    engine.keep_up_to_date(transform("engine", module, run))
    return engine


def holds_parts(parameters: Parameters, context: DistributedContext) -> bool:
    """Whether each process of the run may hold parts of the module alone."""
    return plugin_engine(dict(parameters.parallel), processes=context.world_size) not in (None, *GIVEN_WHOLE)


def find_plugin_engine(parallel: Parallel, *, processes: int) -> Callable[[EngineInputs], Engine] | None:
    """Returns what builds the engine of a run of so many `processes` in a plugin; None where the core has it. Raises
    UserError if no plugin has it."""
    name, plugins = plugin_engine(dict(parallel), processes=processes), registry()
    if name is None:
        return None
    if name not in plugins.engines:
        raise UserError(
            f'parallel: no plugin has the engine of "{parallel.describe()}"{plugins.missing("engines", name)}'
        )
    return plugins.engines[name][0]
