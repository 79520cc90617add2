"""Converts options of pretrain_gpt.py to the parts of the parameter JSON about a run: length, precision, processes,
checkpoints, trackers."""

from __future__ import annotations

from typing import Any

from terakoya_megatron.script_options import Options, parse_integer


def convert_length(options: Options, batch: int | None, row: int | None) -> dict[str, Any]:
    """Converts the length of the run to one limit, the one that ends the run first."""
    steps = options.take("train-iters", parse_integer)
    samples = options.take("train-samples", parse_integer)
    tokens = options.take("train-tokens", parse_integer)
    converted: dict[str, Any] = {"max_minutes": options.take("exit-duration-in-mins", float)}
    if steps and samples:
        options.mark_unsupported("train-iters", f"{steps}: --train-samples is used; Megatron refuses the two together")
        steps = None
    if tokens and (samples or steps):
        other = "train-samples" if samples else "train-iters"
        rows = samples or (batch and batch * steps)
        if not rows or not row:
            options.mark_unsupported(
                other, f"{samples or steps}: whether it ends the run before --train-tokens depends on the batch"
            )
            samples = steps = None
        elif rows * row < tokens:
            options.mark_ignored("train-tokens", f"{other} ends the run earlier")
            tokens = None
        else:
            options.mark_ignored(other, "train-tokens ends the run earlier")
            samples = steps = None
    if tokens:
        converted["max_tokens"] = tokens
    elif samples and batch:
        converted["max_steps"] = -(-samples // batch)
    elif samples:
        options.mark_unsupported("train-samples", f"{samples}: can be converted to steps only with --global-batch-size")
    else:
        converted["max_steps"] = steps
    return {key: value for key, value in converted.items() if value is not None}


def convert_precision_and_memory(options: Options) -> dict[str, Any]:
    """Converts precision, attention, micro-batch, activation checkpointing and seed."""
    converted: dict[str, Any] = {
        "micro_batch_size": options.take("micro-batch-size", parse_integer),
        "max_grad_norm": options.take("clip-grad", float, default=1.0),
        "seed": options.take("seed", parse_integer, default=1234),
        "precision": "fp32",
    }
    for name in ("bf16", "fp16"):
        if options.take_switch(name):
            converted["precision"] = name
    converted["loss_scaling"] = convert_loss_scaling(options, converted["precision"])
    for name in ("fp8-format", "fp8-hybrid"):
        if options.take_switch(name):
            converted["precision"] = "fp8"
    if options.take_switch("deterministic-mode"):
        converted["deterministic"] = True
    if options.take_switch("checkpoint-in-cpu"):
        converted["activation_offloading"] = True
    for name in ("use-flash-attn", "use-flash-attn-v2", "use-flash-attn-triton"):
        if options.take_switch(name):
            converted["attention"] = "flash"
    key = "activation_checkpointing"
    granularity = "selective" if options.take_switch("recompute-activations") else None
    granularity = options.take("recompute-granularity", str) or granularity
    for name in ("checkpoint-activations", "deepspeed-activation-checkpointing"):
        granularity = "full" if options.take_switch(name) else granularity
    if granularity not in ("full", "selective", None):
        options.mark_unsupported("recompute-granularity", f"{granularity}: another granularity than full and selective")
        granularity = None
    return {**converted, key: granularity}


def convert_loss_scaling(options: Options, precision: str | None) -> dict[str, float] | None:
    """Converts the loss scaling of fp16, if the script sets it."""
    converted = {}
    for name, key in (
        ("loss-scale", "fixed"), ("initial-loss-scale", "init_scale"), ("loss-scale-window", "growth_interval"),
        ("min-loss-scale", "min_scale"), ("hysteresis", "hysteresis"),
    ):  # fmt: skip
        is_count = key in ("growth_interval", "hysteresis")
        value = options.take(name, parse_integer if is_count else float)
        if value is None:
            continue
        if precision != "fp16":
            options.mark_ignored(name, "only fp16 has a loss scale")
        elif name == "loss-scale" and not value:
            options.mark_ignored(name, "0 means a dynamic scale, which is the default")
        elif "fixed" in converted:
            options.mark_ignored(name, "the scale is fixed")
        else:
            converted[key] = value
    return converted or None


SIZES = {
    "tensor-model-parallel-size": "tp_size",
    "pipeline-model-parallel-size": "pp_size",
    "context-parallel-size": "cp_size",
    "ds-sequence-parallel-size": "sp_size",
}
"""Option for the number of processes that work on the same rows -> its key under `parallel`."""
FSDP = ("use-torch-fsdp2", "use-megatron-fsdp")
VIRTUAL_STAGES = "num-layers-per-virtual-pipeline-stage"


def convert_parallel(options: Options, layers: int | None) -> dict[str, Any]:
    """Converts ZeRO, the model-parallel sizes, and the timeout. `layers` is the model's number of layers.

    DeepSpeed's ZeRO stands alone; next to a size above 1, `fully_shard` divides what ZeRO divides.
    """
    stage = options.take("zero-stage", parse_integer)
    if options.take_switch("use-distributed-optimizer"):
        stage = 1 if stage is None else stage
    sizes = _convert_sizes(options, layers)
    parallel: dict[str, Any] = {}
    if any([options.take_switch(name) for name in FSDP]):
        parallel = {"engine": "fsdp"}
    elif stage is not None:
        parallel = {"engine": "deepspeed", "zero_stage": stage}
        if sizes:
            parallel = {"engine": "fsdp"} if stage else {}
    parallel |= sizes
    minutes = options.take("distributed-timeout-minutes", parse_integer)
    if minutes:
        parallel["timeout_seconds"] = 60 * minutes
    return parallel


def _convert_sizes(options: Options, layers: int | None) -> dict[str, int]:
    """Converts the model-parallel sizes above 1, and what goes with them."""
    converted = {}
    for name, key in SIZES.items():
        size = options.take(name, parse_integer)
        if size == 1:
            options.mark_ignored(name, "1 changes nothing")
        elif size is not None:
            converted[key] = size
    if options.take_switch("sequence-parallel"):
        if "tp_size" in converted:
            converted["sequence_parallel"] = True
        else:
            options.mark_ignored("sequence-parallel", "it changes nothing without tensor parallelism")
    layers_per_stage = options.take(VIRTUAL_STAGES, parse_integer)
    if layers_per_stage is not None:
        stages, rest = divmod(layers or 0, layers_per_stage * converted.get("pp_size", 1))
        if "pp_size" not in converted or rest or not stages:
            options.mark_unsupported(
                VIRTUAL_STAGES, f"{layers_per_stage}: without pp_size, or layers that it does not divide"
            )
        else:
            converted["pp_stages_per_process"] = stages
    return converted


def convert_start(options: Options, notes: list[str]) -> str | None:
    """Converts the checkpoint that the run starts from with a new optimizer."""
    switches = [name for name in ("finetune", "no-load-optim") if options.take_switch(name)]
    source: str | None = options.take("load", str, "start_from", allow_unknown=True) if switches else None
    if switches and source is None:
        for name in switches:
            options.mark_ignored(name, "without --load there is nothing to start from")
    elif source is not None:
        notes.append(
            "start_from names Megatron's checkpoint: convert it with `terakoya import megatron "
            f"{source} --out DIR`, and name the new folder"
        )
    return source


def convert_trackers(options: Options) -> list[dict[str, Any]]:
    """Converts TensorBoard and Weights & Biases."""
    converted: list[dict[str, Any]] = []
    if options.take_switch("tensorboard-dir"):
        converted.append({"type": "tensorboard"})
    wandb: dict[str, Any] = {}
    for key in ("project", "entity", "group", "name", "exp-name", "tag"):
        value = options.take(f"wandb-{key}", str, allow_unknown=True)
        if value is not None:
            wandb[{"exp-name": "name", "tag": "tags"}.get(key, key)] = [value] if key == "tag" else value
    if options.take_switch("use-wandb") or wandb:
        converted.append({"type": "wandb", **wandb})
    return converted


def convert_saving(options: Options, data: dict[str, Any]) -> dict[str, Any]:
    """Converts checkpoints, validation and logging."""
    save = options.take("save-interval", parse_integer)
    every = options.take("eval-interval", parse_integer)
    batches = options.take("eval-iters", parse_integer)
    converted: dict[str, Any] = {"logging_steps": options.take("log-interval", parse_integer) or 100}
    if save:
        converted["checkpoint"] = {"save_steps": save}
    if any([options.take_switch(name) for name in ("log-optimizer-states-to-tensorboard", "log-params-norm")]):
        converted["events"] = {"optimizer_state": {}}
    has_data = data.get("validation") or (len(data.get("split", ())) > 1 and data["split"][1])
    if has_data and batches != 0:
        converted["evaluation"] = {"steps": every or 1000, "batches": batches or 100}  # Megatron's defaults
    else:
        for name in ("eval-interval", "eval-iters"):
            if name in options:
                reason = "validation is off: --eval-iters 0" if has_data else "there is no validation data"
                options.mark_ignored(name, reason)
    return converted
