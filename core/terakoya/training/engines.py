"""Which engine runs `parameters`, built over a module whose weights are drawn and the same on every process."""

from __future__ import annotations

from torch import nn

from terakoya.data.vocab import Vocabulary
from terakoya.loss_scaling_settings import LossScaling
from terakoya.parameters import Parameters
from terakoya.training import distributed_fp8
from terakoya.training.distributed import Connection
from terakoya.training.distributed_ddp import DDPEngine
from terakoya.training.engine import Engine
from terakoya.training.loss_scaling import LossScaler


def build(
    parameters: Parameters,
    module: nn.Module,
    vocabulary: Vocabulary,
    connection: Connection,
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
        scaler = LossScaler(parameters.loss_scaling or LossScaling(), connection.device)
    if parallel.engine == "deepspeed":
        from terakoya.training.distributed_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(
            connection, module, parameters.optimizer,
            parallel=parallel, precision=parameters.precision,
            max_grad_norm=parameters.max_grad_norm, micro_steps=micro_steps, micro_batch_size=micro_batch_size,
            scaler=scaler,
        )  # fmt: skip
    if parallel.engine == "fsdp" and connection.world_size > 1:  # one process has nothing to share
        from terakoya.training.distributed_fsdp import FSDPEngine

        return FSDPEngine(connection, module, parameters, vocabulary, scaler=scaler)
    if parallel.tp_size > 1:
        from terakoya.training.distributed_tensor import TensorParallelEngine

        return TensorParallelEngine(connection, module, parameters, vocabulary, scaler=scaler, micro_steps=micro_steps)
    if parallel.pp_size > 1:
        from terakoya.training.distributed_pipeline import PipelineEngine

        return PipelineEngine(connection, module, parameters, vocabulary, scaler=scaler, micro_steps=micro_steps)
    if parallel.sp_size > 1:
        from terakoya.training.distributed_sequence import SequenceParallelEngine

        return SequenceParallelEngine(
            connection, module, parameters, vocabulary, scaler=scaler, micro_steps=micro_steps
        )
    module.to(connection.device)
    if parameters.precision == "fp8":
        distributed_fp8.convert(module)
    optimizer = parameters.optimizer.build(module, fused=connection.device.type in ("cpu", "cuda"))
    return DDPEngine(
        connection, module, optimizer,
        precision=parameters.precision, max_grad_norm=parameters.max_grad_norm, scaler=scaler,
        micro_steps=micro_steps,
    )  # fmt: skip
