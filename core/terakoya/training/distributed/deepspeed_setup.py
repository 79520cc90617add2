"""Sets DeepSpeed up for `terakoya_parallel/deepspeed.py`: its Accelerator, its configuration, its messages."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from terakoya.config.parallel import Parallel
from terakoya.errors import UserError
from terakoya.training.distributed.environment import launcher_variables, without_compiler
from terakoya.training.distributed.topology import LaunchInfo

if TYPE_CHECKING:
    from accelerate import Accelerator

PERSISTENCE_THRESHOLD = 100_000
"""Stage 3 keeps parameters of fewer elements than this whole on every process; DeepSpeed's own default."""
BUCKET_ELEMENTS = 500_000_000
"""Elements of the buffer through which gradients are sent; DeepSpeed's own default. DeepSpeed allocates it whole, so a
smaller model gets a buffer of the size of its gradients."""


def create_accelerator(launch: LaunchInfo, handlers: Sequence[Any]) -> Accelerator:
    """Returns an Accelerator for DeepSpeed; `handlers` give the process group's backend and timeout.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    with launcher_variables(launch.rank, launch.world_size, launch.local_rank):
        _import_deepspeed()
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        # stage 0 until the engine is built: under stage 3 Transformers would partition models as they are constructed
        plugin = DeepSpeedPlugin(
            hf_ds_config=deepspeed_config(
                0, max_grad_norm=0.0, micro_steps=1, micro_batch_size=1, world_size=launch.world_size
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
    """Returns DeepSpeed's configuration. Missing settings have surprising defaults: gradients are clipped at 1.0."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_steps,
        "train_batch_size": micro_batch_size * micro_steps * world_size,
        "gradient_clipping": max_grad_norm if zero_stage else 0.0,  # in stage 0 torch clips
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
    """Returns the offload settings of `zero_optimization`; pages on the host are pinned where a GPU reads them."""
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    devices = {
        "offload_optimizer": parallel.offload_optimizer_device,
        "offload_param": parallel.offload_param_device,
    }
    return {name: dict(host) for name, target in devices.items() if target is not None}


def _import_deepspeed() -> None:
    """Imports DeepSpeed, silenced below warnings; without a GPU, also without the kernels that it would compile.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f'parallel.engine "deepspeed": {error}; install it with `pip install "terakoya[deepspeed]"`'
        ) from error
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_relevant)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}
    _import_muon_uncompiled()


def _import_muon_uncompiled() -> None:
    """Imports DeepSpeed's Muon as plain functions.

    DeepSpeed compares the class of each optimizer with its Muon, whose import decorates functions with `torch.compile`,
    which imports torch's whole compiler: seconds of every process's start, for functions that no optimizer here calls.
    """
    with without_compiler(), contextlib.suppress(ImportError):  # a version without it
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for DeepSpeed's warning about optimizers it does not know: we check `Optimizer.elementwise` instead."""
    return "untested optimizer" not in record.getMessage()
