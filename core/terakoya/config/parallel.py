"""How processes work together: the key `parallel` of the parameter JSON, named as Accelerate's `ParallelismConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from terakoya.config.deepspeed import OFFLOADS, find_offload_problems, offload_device
from terakoya.config.nccl import Nccl
from terakoya.config.settings import Settings
from terakoya.errors import UserError, nearest
from terakoya.json_settings import read_settings
from terakoya.plugins.engines import SIZES, engine_names


class Parallel(Settings):
    """How processes work together. They form data-parallel replicas of the model; each replica has its own rows."""

    engine: Annotated[str, Field(json_schema_extra=lambda schema: schema.update(enum=engine_names()))] = "ddp"
    """How data-parallel replicas are kept equal: torch's DistributedDataParallel, DeepSpeed's ZeRO, torch's
    `fully_shard` (FSDP2), or what a plugin has under this name."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """DeepSpeed's stage, which says what is divided among the processes: nothing (0), the optimizer state (1),
    gradients too (2), weights too (3). Only with `engine` deepspeed."""
    offload_optimizer_device: Literal["cpu"] | None = None
    """Where ZeRO keeps and updates the fp32 weights and the optimizer state; null is the device that computes."""
    offload_param_device: Literal["cpu"] | None = None
    """Where ZeRO 3 keeps weights that are not in use; null is the device that computes."""
    deepspeed_config: dict[str, Any] | None = None
    """DeepSpeed's own settings, or a file of them, for those without a key here. Settings that would change the results
    of training are refused."""
    dp_shard_size: Annotated[int, Field(ge=2)] | None = None
    """How many neighbouring replicas share the weights among themselves; the groups add up their gradients (hybrid
    sharding, HSDP). A replica is one process, or several with `tp_size`, `pp_size` or `sp_size`. With the number of
    replicas of a node, weights are gathered within nodes alone. null is all. Only with `engine` fsdp. Unit:
    replicas."""
    tp_size: PositiveInt = 1
    """Processes that share each matrix product of a replica, and its vocabulary (tensor parallelism). Unit:
    processes."""
    sequence_parallel: bool = False
    """Whether the processes of `tp_size` also share norms, dropout and residuals: between matrix products each keeps
    its own positions of a row (Megatron-LM's sequence parallelism; Korthikanti et al., 2022, arXiv:2205.05198), which
    needs less memory. `sp_size` is something else."""
    pp_size: PositiveInt = 1
    """Processes that share the blocks of a replica, one after another (pipeline parallelism). Unit: processes."""
    pp_stages_per_process: PositiveInt = 1
    """Number of stages (adjacent blocks) of a process; above 1 the pipeline is interleaved."""
    pp_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """The order in which a process runs forwards and backwards. `zero_bubble` is ZB1P (Qi et al., 2023): gradients of
    weights are computed apart from those of hidden states, when a process would wait for others."""
    sp_size: PositiveInt = 1
    """Processes that share the positions of the rows of a replica; they exchange heads for positions in attention
    (Ulysses). Unit: processes."""
    cp_size: PositiveInt = 1
    """Processes that share the positions of the rows of a replica; they gather keys and values in attention (context
    parallelism), and may be more than a model has heads. In place of `sp_size`. Unit: processes."""
    timeout_seconds: PositiveInt = 600
    """How long a process waits for the others before the run fails. Unit: seconds."""
    nccl: Nccl = Nccl()
    """What NCCL and torch's watchdog of it print, keep and wait for."""

    @property
    def replica_size(self) -> int:
        """Number of processes that work on the same rows."""
        return self.tp_size * self.pp_size * self.sp_size * self.cp_size

    @property
    def position_processes(self) -> int:
        """Number of processes that share the positions of a row."""
        return self.sp_size * self.cp_size

    def shard_size(self, replicas: int) -> int:
        """Number of replicas that share the weights under `engine` fsdp, of `replicas` in all. Raises UserError unless
        `dp_shard_size` divides them."""
        size = self.dp_shard_size or replicas
        if replicas % size and replicas > 1:  # one alone has nothing to share
            divisors = [str(each) for each in range(2, replicas + 1) if replicas % each == 0]
            raise UserError(
                f"parallel.dp_shard_size {size}: groups of {size} replicas share the weights, but the run has "
                f"{replicas} replicas; use {' or '.join(divisors)}, or null for one group of all"
            )
        return min(size, replicas)

    @property
    def offloaded(self) -> frozenset[str]:
        """Which of `OFFLOADS` ZeRO keeps on the host, by a key here or in `deepspeed_config`."""
        section = (self.deepspeed_config or {}).get("zero_optimization", {})
        return frozenset(
            name
            for name in OFFLOADS
            if getattr(self, f"{name}_device") is not None or offload_device(section, name) != "none"
        )

    def describe(self) -> str:
        """For example `ddp, tp_size 2`."""
        sizes = {name: getattr(self, name) for name in ("dp_shard_size", *SIZES)}
        parts = [self.engine, *(f"{name} {size}" for name, size in sizes.items() if (size or 1) > 1)]
        return ", ".join([*parts, *(["sequence_parallel"] if self.sequence_parallel else [])])

    @field_validator("engine")
    @classmethod
    def _is_engine(cls, value: str) -> str:
        if value in (names := engine_names()):
            return value
        raise ValueError(f'expected the name of an engine, got "{value}"{nearest(value, names)}')

    @field_validator("deepspeed_config", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return read_settings(Path(value))
        except UserError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for problem in self._find_conflicts():
            raise ValueError(problem)
        return self

    def _find_conflicts(self) -> Iterator[str]:
        if self.engine == "deepspeed" and self.zero_stage is None:
            yield 'engine "deepspeed" needs zero_stage: 0, 1, 2 or 3'
        if self.engine != "deepspeed" and self.zero_stage is not None:
            yield f'zero_stage {self.zero_stage} needs engine "deepspeed", got "{self.engine}"'
        if self.dp_shard_size is not None and self.engine != "fsdp":
            yield f'dp_shard_size {self.dp_shard_size} needs engine "fsdp", got "{self.engine}"'
        for key in OFFLOADS:
            if getattr(self, f"{key}_device") is not None:
                yield from find_offload_problems(key, self.zero_stage, f"{key}_device")
        if self.deepspeed_config is not None and self.engine != "deepspeed":
            yield f'deepspeed_config needs engine "deepspeed", got "{self.engine}"'
        if self.sequence_parallel and self.tp_size == 1:
            yield (
                "sequence_parallel, Megatron-LM's sharing of norms and dropout among the processes of tp_size, needs "
                "tp_size above 1. sp_size is something else: its processes share the positions of rows and exchange "
                "heads for positions in attention (Ulysses)"
            )
        if self.sequence_parallel and self.pp_schedule == "zero_bubble":
            yield (
                'sequence_parallel gathers activations again in each backward, which pp_schedule "zero_bubble" cuts in '
                'two; set one of them to its default, false or "1f1b"'
            )
        if self.sp_size > 1 and self.cp_size > 1:
            yield (
                f"sp_size {self.sp_size} and cp_size {self.cp_size} both divide the positions of rows; set one of them "
                "to 1"
            )
        shared = [name for name in SIZES if getattr(self, name) > 1]
        if shared and self.engine == "deepspeed":
            yield (
                f'{shared[0]} {getattr(self, shared[0])} needs engine "ddp" or "fsdp", got "deepspeed"; use '
                f'"engine": "fsdp", which divides what ZeRO divides, or set {shared[0]} to 1'
            )
        if self.pp_stages_per_process > 1 and self.pp_size == 1:
            yield f"pp_stages_per_process {self.pp_stages_per_process} needs pp_size of at least 2, got 1"
        if self.pp_schedule != "1f1b" and self.pp_size == 1:
            yield f'pp_schedule "{self.pp_schedule}" needs pp_size of at least 2, got 1'
