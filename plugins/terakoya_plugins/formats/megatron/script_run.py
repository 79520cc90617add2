"""Of the parameter JSON that a pretrain_gpt.py's options become: length, numbers, processes, saving, tracking."""

from __future__ import annotations

from typing import Any

from terakoya_plugins.formats.megatron.script_options import Options, whole


def length(options: Options, batch: int | None, row: int | None) -> dict[str, Any]:
    """How long the run is: exactly one measure, the one that ends it first."""
    steps = options.take("train-iters", whole, "max_steps")
    samples = options.take("train-samples", whole, "max_steps")
    tokens = options.take("train-tokens", whole, "max_tokens")
    found: dict[str, Any] = {"max_minutes": options.take("exit-duration-in-mins", float, "max_minutes")}
    if tokens and samples and row and samples * row < tokens:
        options.no_place("train-tokens", f"{tokens}: train-samples end the run before")
        tokens = None
    elif tokens and samples:
        options.nothing_lost("train-samples", "train-tokens end the run before")
        samples = None
    if tokens:
        found["max_tokens"] = tokens
    elif samples and batch:
        found["max_steps"] = -(-samples // batch)
    elif samples:
        options.no_place("train-samples", f"{samples}: a number of steps only with --global-batch-size")
    else:
        found["max_steps"] = steps
    return {key: value for key, value in found.items() if value is not None}


def numbers_and_memory(options: Options) -> dict[str, Any]:
    """Precision, attention, batches of a process, what is computed again, seed."""
    found: dict[str, Any] = {
        "micro_batch_size": options.take("micro-batch-size", whole, "micro_batch_size"),
        "max_grad_norm": _or(options.take("clip-grad", float, "max_grad_norm"), 1.0),
        "seed": _or(options.take("seed", whole, "seed"), 1234),
    }
    for name in ("bf16", "fp16"):
        if options.switch(name, "precision"):
            found["precision"] = name
    found["loss_scaling"] = loss_scaling(options, found.get("precision"))
    for name in ("fp8-format", "fp8-hybrid"):
        if options.switch(name, "precision"):
            found["precision"] = "fp8"
    for name in ("use-flash-attn", "use-flash-attn-v2"):
        if options.switch(name, "attention"):
            found["attention"] = "flash"
    key = "activation_checkpointing"
    again = "selective" if options.switch("recompute-activations", key) else None
    again = options.take("recompute-granularity", str, key) or again
    for name in ("checkpoint-activations", "deepspeed-activation-checkpointing"):
        again = "full" if options.switch(name, key) else again
    if again not in ("full", "selective", None):
        options.no_place("recompute-granularity", f"{again}: another granularity than full and selective")
        again = None
    return {**found, key: again}


def loss_scaling(options: Options, precision: str | None) -> dict[str, float] | None:
    """How fp16's losses are scaled, where the script says it."""
    found = {}
    for name, key in (
        ("loss-scale", "fixed"), ("initial-loss-scale", "init_scale"), ("loss-scale-window", "growth_interval"),
        ("min-loss-scale", "min_scale"), ("hysteresis", "hysteresis"),
    ):  # fmt: skip
        counted = key in ("growth_interval", "hysteresis")
        value = options.take(name, whole if counted else float, f"loss_scaling.{key}")
        if value is None:
            continue
        if precision != "fp16":
            options.nothing_lost(name, "only fp16 has a scale")
        elif name == "loss-scale" and not value:
            options.nothing_lost(name, "0 lets the scale rise and fall, as it does anyway")
        elif "fixed" in found:
            options.nothing_lost(name, "the scale is fixed")
        else:
            found[key] = value
    return found or None


SHARED = {
    "tensor-model-parallel-size": "tp_size",
    "pipeline-model-parallel-size": "pp_size",
    "ds-sequence-parallel-size": "sp_size",
}
"""How many processes work on the same rows, and the key under `parallel`."""
VIRTUAL = "num-layers-per-virtual-pipeline-stage"


def processes(options: Options, layers: int | None) -> dict[str, Any]:
    """ZeRO, or what processes share of a model of so many `layers`, and how long they wait for each other."""
    stage = options.take("zero-stage", whole, "parallel.zero_stage")
    if options.switch("use-distributed-optimizer", "parallel.zero_stage"):
        stage = 1 if stage is None else stage
    parallel: dict[str, Any] = {} if stage is None else {"engine": "deepspeed", "zero_stage": stage}
    parallel |= _shared(options, layers, zero=stage is not None)
    minutes = options.take("distributed-timeout-minutes", whole, "parallel.timeout_seconds")
    if minutes:
        parallel["timeout_seconds"] = 60 * minutes
    return parallel


def _shared(options: Options, layers: int | None, *, zero: bool) -> dict[str, int]:
    """The one size above 1, where ZeRO is not asked for: more does not go together here."""
    sizes = {}
    for name, key in SHARED.items():
        size = options.take(name, whole, f"parallel.{key}")
        if size == 1:
            options.nothing_lost(name, "1 is nothing")
        elif size is not None:
            sizes[name] = size
    each = options.take(VIRTUAL, whole, "parallel.pp_stages_per_process")
    if zero or len(sizes) > 1:
        for name, size in sizes.items():
            options.no_place(name, f"{size}: not together with {'ZeRO' if zero else 'the other'}; choose one of them")
        sizes = {}
    found = {SHARED[name]: size for name, size in sizes.items()}
    if each is not None:
        stages, rest = divmod(layers or 0, each * found.get("pp_size", 1))
        if "pp_size" not in found or rest or not stages:
            options.no_place(VIRTUAL, f"{each}: without pp_size, or layers that it does not divide")
        else:
            found["pp_stages_per_process"] = stages
    return found


def start(options: Options, notes: list[str]) -> str | None:
    """What the run's weights come from, where the optimizer of that is left behind."""
    asked = [name for name in ("finetune", "no-load-optim") if options.switch(name, "start_from")]
    source: str | None = options.take("load", str, "start_from", as_written=True) if asked else None
    if asked and source is None:
        for name in asked:
            options.nothing_lost(name, "without --load there is nothing to start from")
    elif source is not None:
        notes.append(
            "start_from names Megatron's checkpoint: make a Transformers folder of it with `terakoya import megatron "
            f"{source} --out DIR`, and name that"
        )
    return source


def trackers(options: Options) -> list[dict[str, Any]]:
    """TensorBoard and Weights & Biases."""
    found: list[dict[str, Any]] = []
    if options.switch("tensorboard-dir", "trackers"):
        found.append({"type": "tensorboard"})
    wandb: dict[str, Any] = {}
    for key in ("project", "entity", "group", "name", "exp-name", "tag"):
        value = options.take(f"wandb-{key}", str, "trackers", as_written=True)
        if value is not None:
            wandb[{"exp-name": "name", "tag": "tags"}.get(key, key)] = [value] if key == "tag" else value
    if options.switch("use-wandb", "trackers") or wandb:
        found.append({"type": "wandb", **wandb})
    return found


def saving(options: Options, data: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints, validation, logging."""
    save = options.take("save-interval", whole, "checkpoint.save_steps")
    every = options.take("eval-interval", whole, "evaluation.steps")
    batches = options.take("eval-iters", whole, "evaluation.batches")
    found: dict[str, Any] = {"logging_steps": options.take("log-interval", whole, "logging_steps") or 100}
    if save:
        found["checkpoint"] = {"save_steps": save}
    if data.get("validation") or (len(data.get("split", ())) > 1 and data["split"][1]):
        found["evaluation"] = {"steps": every or 1000, "batches": batches or 100}  # Megatron's defaults
    else:
        for name in ("eval-interval", "eval-iters"):
            if name in options:
                options.nothing_lost(name, "there is nothing to validate on")
    return found


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
