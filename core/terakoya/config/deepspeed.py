"""A user's own DeepSpeed JSON (`parallel.deepspeed_config`): what of it is taken over, and what it may not contradict.

What the parameter JSON says already (batch sizes, clipping, precision, stage) has to be the same there, or "auto", or
not there. How DeepSpeed moves numbers around is taken over: buckets, overlap, offloading, logging. What would make
another training of it (its own optimizers and schedules, quantised communication, curricula) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from terakoya.errors import UserError, nearest

AUTO = "auto"
"""What Transformers' `Trainer` fills in; here it is filled in too."""

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
"""Keys that change no number that is trained."""
BATCH = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})
"""Keys whose values follow from the parameters and from how many processes there are."""
FIXED: Mapping[str, Any] = {
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_predivide_factor": 1.0,
    "prescale_gradients": False,
    "sparse_gradients": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""Keys that have this value and no other: gradients are added up in fp32, by the optimizer of the parameters."""
PARAMETER_KEYS: Mapping[str, str] = {"optimizer": "optimizer", "scheduler": "schedule"}
"""DeepSpeed's sections for what has a key of its own here."""
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
"""Keys of `zero_optimization` with which other numbers would be trained, or saved."""
OFFLOAD_OPTIMIZER, OFFLOAD_PARAM = "offload_optimizer", "offload_param"
OFFLOADS = (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
KEY = "parallel.deepspeed_config"


def find_problems(config: Mapping[str, Any], *, zero_stage: int, max_grad_norm: float, precision: str) -> Iterator[str]:
    """What in `config` cannot be taken over, whatever the processes are: where, what was got, what to do."""
    known = {*PASSED_ON, *BATCH, *FIXED, *PARAMETER_KEYS, *PRECISIONS, "zero_optimization", "gradient_clipping"}
    for key, value in config.items():
        if value == AUTO or key in PASSED_ON | BATCH:
            continue
        if key in FIXED and value != FIXED[key]:
            yield f"{KEY}.{key}: expected {FIXED[key]!r}, which is how gradients are added up here, got {value!r}"
        elif key in PARAMETER_KEYS:
            yield f'{KEY}.{key}: say it with the key "{PARAMETER_KEYS[key]}" of the parameters, and leave it out there'
        elif key in PRECISIONS and value.get("enabled") not in (None, False, AUTO) and precision != key:
            yield f'{KEY}.{key}: is enabled, but precision is "{precision}"; set "precision": "{key}"'
        elif key == "gradient_clipping" and value != max_grad_norm:
            yield f"{KEY}.{key}: {value!r}, but max_grad_norm is {max_grad_norm!r}; they have to be the same"
        elif key not in known:
            yield f"{KEY}.{key}: is nothing that can be handed on{nearest(key, sorted(known))}; leave it out"
    yield from _zero_problems(config.get("zero_optimization", {}), zero_stage)


def _zero_problems(section: Mapping[str, Any], zero_stage: int) -> Iterator[str]:
    where = f"{KEY}.zero_optimization"
    if section.get("stage", AUTO) not in (AUTO, zero_stage):
        yield f"{where}.stage: {section['stage']!r}, but parallel.zero_stage is {zero_stage}; they have to be the same"
    for key in sorted(CHANGES_TRAINING & section.keys()):
        if section[key] not in (None, False):
            yield f"{where}.{key}: trains other numbers than the other engines do; leave it out"
    for key in OFFLOADS:
        device = offload_device(section, key)
        if device == "nvme":
            yield f'{where}.{key}.device: "nvme" is not tried here; use "cpu"'
        elif device != "none":
            yield from find_offload_problems(key, zero_stage, f"{where}.{key}")


def offload_device(section: Mapping[str, Any], name: str) -> str:
    """Where `zero_optimization` puts what `name`, one of `OFFLOADS`, says; "none" is nowhere else."""
    return str((section.get(name) or {}).get("device", "none"))


def find_offload_problems(name: str, zero_stage: int | None, where: str) -> Iterator[str]:
    """Why `name`, one of `OFFLOADS`, does not go with the stage, if it does not."""
    least = 1 if name == OFFLOAD_OPTIMIZER else 3
    if zero_stage is None or zero_stage < least:
        got = "none" if zero_stage is None else str(zero_stage)
        yield f"{where}: needs zero_stage {'1, 2 or 3' if least == 1 else '3'}, got {got}"


def merge_configs(config: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """`ours`, the configuration that follows from the parameters, with what `config` adds to it.

    Raises:
        UserError: batch sizes that are not those of the parameters and processes.
    """
    for key in sorted(BATCH & config.keys()):
        if config[key] not in (AUTO, ours[key]):
            raise UserError(
                f"{KEY}.{key}: is {config[key]!r}, but by batch_size and micro_batch_size it is {ours[key]}; write "
                '"auto"'
            )
    result = {**ours, **{key: value for key, value in config.items() if key in PASSED_ON and value != AUTO}}
    section = {key: value for key, value in config.get("zero_optimization", {}).items() if value != AUTO}
    result["zero_optimization"] = {**ours["zero_optimization"], **section}
    return result
