"""The cases of the table of engines: engines, architectures, and the parameters of a run with both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"engine": "ddp"},
    **{f"ZeRO-{stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "fsdp": {"engine": "fsdp"},
    "tp 2": {"tp_size": 2},
    "pp 2": {"pp_size": 2},
    "pp 2, interleaved": {"pp_size": 2, "pp_stages_per_process": 2},
    "pp 2, interleaved, zero bubble": {"pp_size": 2, "pp_stages_per_process": 2, "pp_schedule": "zero_bubble"},
    "sp 2": {"sp_size": 2},
    "cp 2": {"cp_size": 2},
    "fsdp, sp 2": {"engine": "fsdp", "sp_size": 2},
    "fsdp, tp 2": {"engine": "fsdp", "tp_size": 2},
    "fsdp, pp 2": {"engine": "fsdp", "pp_size": 2},
    "fsdp, pp 2, interleaved": {"engine": "fsdp", "pp_size": 2, "pp_stages_per_process": 2},
    "tp 2, pp 2, 2 replicas": {"tp_size": 2, "pp_size": 2},
    "fsdp, tp 2, pp 2": {"engine": "fsdp", "tp_size": 2, "pp_size": 2},
    "fsdp, tp 2, cp 2": {"engine": "fsdp", "tp_size": 2, "cp_size": 2},
    "fsdp, tp 2, 2 groups": {"engine": "fsdp", "tp_size": 2, "dp_shard_size": 2},
    "tp 2, pp 2, sp 2": {"tp_size": 2, "pp_size": 2, "sp_size": 2},
    "tp 2, sequence parallel": {"tp_size": 2, "sequence_parallel": True},
    "fsdp, tp 2, sequence parallel": {"engine": "fsdp", "tp_size": 2, "sequence_parallel": True},
}
"""The value of `parallel` for each engine."""


def processes(engine: str) -> int:
    """The number of processes that `engine` is run with: where kinds of parallelism work together, two replicas, of
    three kinds one."""
    engine = engine.removesuffix(", sequence parallel")
    if "," not in engine or engine.startswith("pp 2, interleaved"):
        return 2
    return 8 if engine.startswith(("tp 2, pp 2", "fsdp, tp 2, 2")) else 4


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 32}
"""Four blocks: an interleaved pipeline has two of them on each of two processes."""
INNER = {"intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CAUSAL = {"type": "causal_lm"}
ARCHITECTURES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "bert": ({**SIZES, **INNER, **NO_DROPOUT}, {"type": "masked_lm"}),
    "electra": (
        {**SIZES, **INNER, **NO_DROPOUT, "embedding_size": 24},
        {"type": "replaced_token", "generator_size": "1/2"},
    ),
    "gpt2": ({**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, CAUSAL),
    "gptj": ({**SIZES, "rotary_dim": 4}, CAUSAL),
    "llama": ({**SIZES, **INNER, "num_key_value_heads": 2}, CAUSAL),
    "qwen3": ({**SIZES, **INNER, "num_key_value_heads": 2, "head_dim": 8}, CAUSAL),
}
"""Settings of architecture and objective."""

QUICK: Mapping[str, str] = {
    "ddp": "bert", "ZeRO-0": "gptj", "ZeRO-1": "electra", "ZeRO-2": "qwen3", "ZeRO-3": "llama", "fsdp": "bert",
    "tp 2": "llama", "pp 2": "gpt2", "pp 2, interleaved": "llama", "sp 2": "qwen3",
}  # fmt: skip
"""One architecture for each engine."""

FIRST, MIDDLE, LAST = 1, 2, 4
"""The step whose gradients are compared, the step from which runs resume, and the last step."""


def parameters(
    store: Path, architecture: str, parallel: Mapping[str, Any] | None, *, last: int = LAST
) -> dict[str, Any]:
    """Returns the parameter JSON of a run of `last` steps that saves after each step.

    With an `eps` of 1 updates are nearly proportional to gradients, so that errors keep their size; the first moment of
    the first step is the gradient times 1 - beta.
    """
    shape, objective = ARCHITECTURES[architecture]
    return {
        "data": {"train": [str(store)], "sequence_length": 32},
        "architecture": {"type": architecture, **shape},
        "objective": dict(objective),
        "optimizer": {"type": "adamw", "learning_rate": 0.05, "eps": 1.0, "weight_decay": 0.1},
        "schedule": {"type": "constant"},
        "precision": "fp32",
        "batch_size": {"-1": 7},
        "micro_batch_size": 2,
        "max_steps": last,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "checkpoint": {"save_steps": 1, "keep": LAST, "model": "never"},
        **({} if parallel is None else {"parallel": dict(parallel)}),
    }
