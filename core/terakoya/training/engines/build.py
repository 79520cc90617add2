"""Builds the engine of a run over its module, whose weights are initialised and equal on every process."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.loss_scaling import LossScaling
from terakoya.config.parallel import Parallel
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.plugins.discovery import might_have
from terakoya.plugins.engines import plugin_engine
from terakoya.plugins.families import missing_family
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.distributed.cpu_allocator import returning_freed_memory
from terakoya_precision import fp8
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.inputs import EngineInputs
from terakoya.training.engines.learning_rates import build_optimizer
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya_precision.bf16_stream import uses_bf16_stream
from terakoya.training.model.deferred import DeferredTensors
from terakoya.training.model.mup import find_scales


@returning_freed_memory()
def build(
    parameters: Parameters,
    module: nn.Module,
    vocabulary: Vocabulary,
    context: DistributedContext,
    micro_steps: int,
    micro_batch_size: int,
    *,
    fused_kernels: bool = False,
    cuda_graphs: bool = False,
    deferred: DeferredTensors | None = None,
) -> Engine:
    """Returns the engine of `parameters` over `module`, with its optimizer. `fused_kernels` and `cuda_graphs` are
    as in `DDPEngine`. `deferred` has the weights where each process `holds_parts` and none has built them all.

    Raises:
        UserError: engine, architecture and optimizer are incompatible, or no plugin has the engine.
    """
    parallel, precision, max_grad_norm = parameters.parallel, parameters.precision, parameters.max_grad_norm
    shares = {name: scale.rate for name, scale in find_scales(parameters, module, vocabulary).items()}
    scaler = None
    if precision == "fp16":
        scaler = LossScaler(parameters.loss_scaling or LossScaling(), context.device)
    if parallel.engine == "deepspeed":
        from terakoya.training.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(
            context, module, parameters.optimizer,
            parallel=parallel, precision=precision, max_grad_norm=max_grad_norm, micro_steps=micro_steps,
            micro_batch_size=micro_batch_size, scaler=scaler, learning_rate_shares=shares,
        )  # fmt: skip
    if precision == "fp8":
        fp8.convert(module)  # weights are the same ones, which an engine may then shard
    build_parts = find_plugin_engine(parallel) if context.world_size > 1 else None
    if build_parts is not None:
        return build_parts(
            EngineInputs(
                parameters, module, vocabulary, context, micro_steps, micro_batch_size, scaler=scaler,
                learning_rate_shares=shares, deferred=deferred,
            )
        )  # fmt: skip
    module.to(context.device)
    optimizer = build_optimizer(parameters.optimizer, module, shares, fused=context.device.type in ("cpu", "cuda"))
    return DDPEngine(
        context, module, optimizer,
        precision=precision, max_grad_norm=max_grad_norm, scaler=scaler, micro_steps=micro_steps,
        bf16_stream=uses_bf16_stream(parameters), fused_kernels=fused_kernels, cuda_graphs=cuda_graphs,
        recomputes=parameters.activation_checkpointing is not None,
    )  # fmt: skip


def holds_parts(parameters: Parameters, context: DistributedContext) -> bool:
    """Whether a plugin has the engine of the run: each process may then hold parts of the module alone."""
    return context.world_size > 1 and plugin_engine(dict(parameters.parallel)) is not None


def find_plugin_engine(parallel: Parallel) -> Callable[[EngineInputs], Engine] | None:
    """Returns what builds the engine of a run of several processes in a plugin; None where the core has it.

    Raises:
        UserError: no plugin has it.
    """
    name, plugins = plugin_engine(dict(parallel)), registry()
    if name is None:
        return None
    if name not in plugins.engines:
        raise UserError(
            f'parallel: no plugin has the engine of "{parallel.describe()}"{missing_family("engines", name)}'
            f"{might_have(plugins.broken, plugins.excluded)}"
        )
    return plugins.engines[name][0]
