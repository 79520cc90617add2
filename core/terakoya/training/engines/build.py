"""Which engine runs `parameters`, built over a module whose weights are drawn and the same on every process."""

from __future__ import annotations

from torch import nn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.loss_scaling import LossScaling
from terakoya.config.parameters import Parameters
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines import fp8 as distributed_fp8
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.loss_scaling import LossScaler


def build(
    parameters: Parameters,
    module: nn.Module,
    vocabulary: Vocabulary,
    context: DistributedContext,
    micro_steps: int,
    micro_batch_size: int,
) -> Engine:
    """The engine of `parameters` over `module`, with its optimizer.

    Raises:
        UserError: engine, architecture and optimizer do not go together.
    """
    parallel = parameters.parallel
    scaler = None
    if parameters.precision == "fp16":
        scaler = LossScaler(parameters.loss_scaling or LossScaling(), context.device)
    if parallel.engine == "deepspeed":
        from terakoya.training.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(
            context, module, parameters.optimizer,
            parallel=parallel, precision=parameters.precision,
            max_grad_norm=parameters.max_grad_norm, micro_steps=micro_steps, micro_batch_size=micro_batch_size,
            scaler=scaler,
        )  # fmt: skip
    if parallel.engine == "fsdp" and context.world_size > 1:  # one process has nothing to share
        from terakoya.training.engines.fsdp import FSDPEngine

        return FSDPEngine(context, module, parameters, vocabulary, scaler=scaler)
    if parallel.tp_size > 1:
        from terakoya.training.engines.tensor_parallel import TensorParallelEngine

        return TensorParallelEngine(context, module, parameters, vocabulary, scaler=scaler, micro_steps=micro_steps)
    if parallel.pp_size > 1:
        from terakoya.training.engines.pipeline_parallel import PipelineEngine

        return PipelineEngine(context, module, parameters, vocabulary, scaler=scaler, micro_steps=micro_steps)
    if parallel.sp_size > 1:
        from terakoya.training.engines.sequence_parallel import SequenceParallelEngine

        return SequenceParallelEngine(context, module, parameters, vocabulary, scaler=scaler, micro_steps=micro_steps)
    module.to(context.device)
    if parameters.precision == "fp8":
        distributed_fp8.convert(module)
    optimizer = parameters.optimizer.build(module, fused=context.device.type in ("cpu", "cuda"))
    return DDPEngine(
        context, module, optimizer,
        precision=parameters.precision, max_grad_norm=parameters.max_grad_norm, scaler=scaler,
        micro_steps=micro_steps,
    )  # fmt: skip
