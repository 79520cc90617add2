"""What `accelerate launch` was asked for and a run does not do: its variables, compared with the run.

accelerate's launcher sets variables for accelerate's `Accelerator`. A run takes the processes that it starts, and
nothing else from it: engine, precision and the rest are keys of the parameter JSON.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from terakoya.components import EventListener, EventPlugin
from terakoya.components.run import Run

SIZES = ("dp_shard_size", "tp_size", "cp_size", "sp_size")
"""The keys of `parallel` that have accelerate's names."""
OFFLOADS = ("offload_optimizer_device", "offload_param_device")


class AccelerateRequests(EventPlugin):
    """Says at the start what accelerate's configuration asks for and the run does not do: an engine, a precision, a
    number of processes. Every run does so."""

    always = True

    def start(self, run: Run) -> EventListener:
        return _Listener()


class _Listener(EventListener):
    def run_started(self, run: Run) -> None:
        if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # which accelerate's launcher always sets
            return
        if run.world_size == 1 and "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
            run.warn(
                "accelerate launch was asked for several processes and has started one, as it does with --cpu; type "
                "`accelerate launch --multi_gpu --num_processes N -m terakoya train ...`, also without GPUs, or "
                "`terakoya train ... --processes N`"
            )
        wanted = read_requests(os.environ)
        own = run.parameters.dump()
        other = {key: value for key, value in wanted.items() if _differs(_value_at(own, key), key, value)}
        if other:
            options = " ".join(f"--set {key}={value}" for key, value in other.items())
            run.warn(
                "accelerate's configuration asks for what the run does not do, which goes by its own parameters alone; "
                f"where it should, add {options}"
            )
        if run.device.type == "cuda" and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
            run.warn('accelerate\'s configuration asks for the CPU; the run takes it with CUDA_VISIBLE_DEVICES=""')


def read_requests(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what the variables of accelerate's launcher ask for: keys of the parameter JSON with their values. What
    accelerate has where nothing is asked for is not in it."""

    def is_set(name: str) -> bool:
        return environment.get(name, "").lower() == "true"

    wanted: dict[str, Any] = {}
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        wanted["parallel.engine"] = "deepspeed"
        if stage := environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"):
            wanted["parallel.zero_stage"] = int(stage)
        if file := environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            wanted["parallel.deepspeed_config"] = file
        for name in OFFLOADS:
            if environment.get(f"ACCELERATE_DEEPSPEED_{name.upper()}", "none") != "none":
                wanted[f"parallel.{name}"] = environment[f"ACCELERATE_DEEPSPEED_{name.upper()}"]
    if is_set("ACCELERATE_USE_FSDP"):
        wanted["parallel.engine"] = "fsdp"
    if is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        sizes = {name: int(environment.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in SIZES}
        wanted |= {f"parallel.{name}": size for name, size in sizes.items() if size > 1}
    if (precision := environment["ACCELERATE_MIXED_PRECISION"]) != "no":
        wanted["precision"] = precision
    return wanted


def _differs(own: Any, key: str, wanted: Any) -> bool:
    """Returns whether a run with `own` at `key` is not as `wanted`. A file is read: its name is not kept."""
    return own is None if key == "parallel.deepspeed_config" else own != wanted


def _value_at(parameters: Any, path: str) -> Any:
    """Returns the value at the dotted `path`; None where there is none."""
    for key in path.split("."):
        parameters = parameters.get(key) if isinstance(parameters, dict) else None
    return parameters
