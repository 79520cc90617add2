"""A user's DeepSpeed JSON (`parallel.deepspeed_config`): the keys that are passed on to DeepSpeed, and those refused.

Settings that the parameter JSON has too (batch sizes, clipping, precision, stage) must be the same, "auto" or absent.
Settings of buckets, overlap, offloading and logging are passed on. Settings that change the results of training
(DeepSpeed's own optimizers and schedules, quantised communication, curricula) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from terakoya.errors import UserError, nearest

AUTO = "auto"
"""The value that is filled in from the parameters, as in Transformers' `Trainer`."""

PASSED_ON = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "comms_logger",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
        "wall_clock_breakdown",
    }
)
"""Keys that do not change the results of training."""
BATCH = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})
"""Keys whose values follow from the parameters and the number of processes."""
FIXED: Mapping[str, Any] = {
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_predivide_factor": 1.0,
    "prescale_gradients": False,
    "sparse_gradients": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""Keys that only accept this value: gradients are added up in fp32, and the optimizer is the parameters'."""
PARAMETER_KEYS: Mapping[str, str] = {"optimizer": "optimizer", "scheduler": "schedule"}
"""DeepSpeed's sections for which the parameter JSON has its own key."""
PRECISIONS = ("bf16", "fp16")

CHANGES_TRAINING = frozenset(
    {
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "zenflow",
        "elastic_checkpoint",
    }
)
"""Keys of `zero_optimization` that change the results of training, or what is saved."""
OFFLOAD_OPTIMIZER, OFFLOAD_PARAM = "offload_optimizer", "offload_param"
OFFLOADS = (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
KEY = "parallel.deepspeed_config"
BUCKET = 500_000_000
"""Elements of DeepSpeed's buffer for gradients by its own default (`reduce_bucket_size`, and stage 0's
`MEMORY_OPT_ALLREDUCE_SIZE`). It is allocated whole; a buffer for all gradients is enough where they are fewer."""
PERSISTENCE_THRESHOLD = 100_000
"""Stage 3 keeps parameters of fewer elements than this whole on every process; DeepSpeed's own default."""


def find_problems(config: Mapping[str, Any], *, zero_stage: int, max_grad_norm: float, precision: str) -> Iterator[str]:
    """Yields what in `config` is refused for any number of processes: where, what was given, what to do."""
    known = {*PASSED_ON, *BATCH, *FIXED, *PARAMETER_KEYS, *PRECISIONS, "zero_optimization", "gradient_clipping"}
    for key, value in config.items():
        if value == AUTO or key in PASSED_ON | BATCH:
            continue
        if key in FIXED and value != FIXED[key]:
            yield f"{KEY}.{key}: expected {FIXED[key]!r}, with which terakoya adds up gradients, got {value!r}"
        elif key in PARAMETER_KEYS:
            yield f'{KEY}.{key}: use the key "{PARAMETER_KEYS[key]}" of the parameters instead, and remove this one'
        elif key in PRECISIONS and value.get("enabled") not in (None, False, AUTO) and precision != key:
            yield f'{KEY}.{key}: is enabled, but precision is "{precision}"; set "precision": "{key}"'
        elif key == "gradient_clipping" and value != max_grad_norm:
            yield f"{KEY}.{key}: {value!r}, but max_grad_norm is {max_grad_norm!r}; they must be the same"
        elif key not in known:
            yield f"{KEY}.{key}: is not supported{nearest(key, sorted(known))}; remove it"
    yield from _zero_problems(config.get("zero_optimization", {}), zero_stage)


def _zero_problems(section: Mapping[str, Any], zero_stage: int) -> Iterator[str]:
    where = f"{KEY}.zero_optimization"
    if section.get("stage", AUTO) not in (AUTO, zero_stage):
        yield f"{where}.stage: {section['stage']!r}, but parallel.zero_stage is {zero_stage}; they must be the same"
    for key in sorted(CHANGES_TRAINING & section.keys()):
        if section[key] not in (None, False):
            yield f"{where}.{key}: changes the results compared with the other engines; remove it"
    for key in OFFLOADS:
        device = offload_device(section, key)
        if device == "nvme":
            yield f'{where}.{key}.device: "nvme" is not supported; use "cpu"'
        elif device != "none":
            yield from find_offload_problems(key, zero_stage, f"{where}.{key}")


def offload_device(section: Mapping[str, Any], name: str) -> str:
    """The device to which the section `zero_optimization` offloads `name`, one of `OFFLOADS`; "none" without it."""
    return str((section.get(name) or {}).get("device", "none"))


def find_offload_problems(name: str, zero_stage: int | None, where: str) -> Iterator[str]:
    """Yields why `name`, one of `OFFLOADS`, is not possible with the stage."""
    least = 1 if name == OFFLOAD_OPTIMIZER else 3
    if zero_stage is None or zero_stage < least:
        got = "none" if zero_stage is None else str(zero_stage)
        yield f"{where}: needs zero_stage {'1, 2 or 3' if least == 1 else '3'}, got {got}"


def merge_configs(config: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """`ours`, the configuration that follows from the parameters, with the keys that `config` adds. Raises UserError if
    batch sizes differ from those of the parameters and processes."""
    for key in sorted(BATCH & config.keys()):
        if config[key] not in (AUTO, ours[key]):
            raise UserError(
                f'{KEY}.{key}: is {config[key]!r}, but batch_size and micro_batch_size give {ours[key]}; write "auto"'
            )
    result = {**ours, **{key: value for key, value in config.items() if key in PASSED_ON and value != AUTO}}
    section = {key: value for key, value in config.get("zero_optimization", {}).items() if value != AUTO}
    result["zero_optimization"] = {**ours["zero_optimization"], **section}
    return result
