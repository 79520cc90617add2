"""Sets DeepSpeed up for `deepspeed.py`: its configuration, the environment that it reads, its messages."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from terakoya.config.deepspeed import BUCKET, PERSISTENCE_THRESHOLD, merge_configs
from terakoya.distributed.context import DistributedContext
from terakoya.errors import import_extra
from terakoya.training.engines.inputs import EngineInputs


def deepspeed_config(inputs: EngineInputs, elements: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration for a model with so many trained `elements`, with the user's own settings.

    Missing settings have surprising defaults: gradients are clipped at 1.0. Pages on the host are pinned where a GPU
    reads them.

    Raises:
        UserError: the user's batch sizes are others than the parameters'.
    """
    parameters, parallel = inputs.parameters, inputs.parameters.parallel
    offloads = {"offload_optimizer": parallel.offload_optimizer_device, "offload_param": parallel.offload_param_device}
    ours = {
        "train_micro_batch_size_per_gpu": inputs.micro_batch_size,
        "gradient_accumulation_steps": inputs.micro_steps,
        "train_batch_size": inputs.micro_batch_size * inputs.micro_steps * inputs.context.world_size,
        "gradient_clipping": parameters.max_grad_norm if parallel.zero_stage else 0.0,  # in stage 0 torch clips
        "zero_optimization": {
            "stage": parallel.zero_stage,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
            "reduce_bucket_size": min(BUCKET, elements),
            **{
                name: {"device": "cpu", "pin_memory": inputs.context.device.type == "cuda"}
                for name, target in offloads.items()
                if target is not None
            },
        },
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    return merge_configs(parallel.deepspeed_config or {}, ours)


def import_deepspeed() -> Any:
    """Returns DeepSpeed, silenced below warnings; without a GPU, also without the kernels that it would compile.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    deepspeed = import_extra("deepspeed", "deepspeed", 'parallel.engine "deepspeed"')
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_relevant)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}
    _import_muon_uncompiled()
    return deepspeed


def _import_muon_uncompiled() -> None:
    """Imports DeepSpeed's Muon as plain functions.

    DeepSpeed compares the class of each optimizer with its Muon, whose import decorates functions with `torch.compile`,
    which imports torch's whole compiler: seconds of every process's start, for functions that no optimizer here calls.
    """
    with environment(TORCHDYNAMO_DISABLE="1"), contextlib.suppress(ImportError):  # a version without it
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for DeepSpeed's warning about optimizers it does not know: we check `Optimizer.elementwise` instead."""
    return "untested optimizer" not in record.getMessage()


def launcher_variables(rank: int, world_size: int, local_rank: int) -> contextlib.AbstractContextManager[None]:
    """Sets a launcher's variables while the context is open."""
    values = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    if not torch.cuda.is_available():
        values["DS_ACCELERATOR"] = "cpu"
    if world_size == 1:
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return environment(**values)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables while the context is open, after which the environment is what it was before: this process may
    start others, or train again in another way."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def find_local_rank(context: DistributedContext) -> int:
    """Returns what DeepSpeed takes both for this process's number on its host and for that of its GPU. It is the latter
    where both differ: a process may see its own GPU alone, as with srun's --gpus-per-task."""
    index = context.device.index
    return context.topology.processes[context.rank].local_rank if index is None else index


def local_rank_variable(local_rank: int) -> contextlib.AbstractContextManager[None]:
    """Sets LOCAL_RANK while the context is open: the one variable that DeepSpeed reads in every step."""
    own = str(local_rank)
    return contextlib.nullcontext() if os.environ.get("LOCAL_RANK") == own else environment(LOCAL_RANK=own)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
