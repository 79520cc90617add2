"""DeepSpeed's own side of `distributed_deepspeed`: its accelerator, its configuration, its messages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from terakoya.config.parallel import Parallel
from terakoya.errors import UserError
from terakoya.training.distributed.environment import launcher_variables
from terakoya.training.distributed.topology import LaunchInfo

if TYPE_CHECKING:
    from accelerate import Accelerator

PERSISTENCE_THRESHOLD = 100_000
"""Stage 3 keeps parameters of fewer elements than this whole on every process; DeepSpeed's own default."""
BUCKET_ELEMENTS = 500_000_000
"""Elements of the buffer that gradients are sent through; DeepSpeed's own default. It is allocated whole, so a smaller
model gets one that holds all its gradients and no more."""


def create_accelerator(launched: LaunchInfo, handlers: Sequence[Any]) -> Accelerator:
    """The Accelerator whose processes DeepSpeed may use; `handlers` hold the process group's backend and timeout.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    with launcher_variables(launched.rank, launched.world_size, launched.local_rank):
        _quiet_deepspeed()
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        # stage 0 until the engine is built: under stage 3 Transformers would partition models as they are constructed
        plugin = DeepSpeedPlugin(
            hf_ds_config=deepspeed_config(
                0, max_grad_norm=0.0, micro_steps=1, micro_batch_size=1, world_size=launched.world_size
            ),
            gradient_accumulation_steps=1,
            gradient_clipping=0.0,
            zero_stage=0,
            zero3_init_flag=False,
        )
        return Accelerator(mixed_precision="no", deepspeed_plugin=plugin, kwargs_handlers=list(handlers))


def deepspeed_config(
    zero_stage: int, *, max_grad_norm: float, micro_steps: int, micro_batch_size: int, world_size: int
) -> dict[str, Any]:
    """DeepSpeed's configuration. What is left out of it has surprising defaults: gradients are clipped at 1.0."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_steps,
        "train_batch_size": micro_batch_size * micro_steps * world_size,
        "gradient_clipping": max_grad_norm if zero_stage else 0.0,  # stage 0 is clipped here, by torch
        "zero_optimization": {"stage": zero_stage, "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def offload_config(parallel: Parallel, device: torch.device) -> dict[str, Any]:
    """What of `zero_optimization` says that something is kept on the host; pages are pinned where a GPU reads them."""
    place = {"device": "cpu", "pin_memory": device.type == "cuda"}
    asked = {
        "offload_optimizer": parallel.offload_optimizer_device,
        "offload_param": parallel.offload_param_device,
    }
    return {name: dict(place) for name, where in asked.items() if where is not None}


def _quiet_deepspeed() -> None:
    """Imports DeepSpeed, silent below warnings, and without the kernels it would compile on a machine without a GPU.

    Raises:
        UserError: it is not installed.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f'parallel.engine "deepspeed": {error}; install it with `pip install "terakoya[deepspeed]"`'
        ) from error
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_tested)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}


def _tested(record: logging.LogRecord) -> bool:
    """Drops DeepSpeed's warning of optimizers it does not know: `Optimizer.elementwise` is what is asked here."""
    return "untested optimizer" not in record.getMessage()
