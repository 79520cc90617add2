"""Settings that are incompatible with tensor parallelism are refused before anything is built; with `--set` it trains,
and a killed run resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy
from killed_runs import kill_and_resume

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_plugins.architectures.gpt2 import GPT2 as GPT2Architecture

GPT2 = {"type": "gpt2", "num_attention_heads": 12, "hidden_size": 48, "n_inner": 120, "max_position_embeddings": 64}
LLAMA = {
    "type": "llama",
    "num_attention_heads": 8,
    "hidden_size": 48,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
CAUSAL = {"type": "causal_lm"}
DATA = {"train": ["store"], "sequence_length": 32}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"parallel": {"tp_size": 8}},
        "parallel.tp_size 8: num_attention_heads 12 of architecture GPT2 cannot be shared evenly; use one of 1, 2, 3, "
        "4, 6, 12",
    ),
    (
        {"architecture": LLAMA, "parallel": {"tp_size": 4}},
        "parallel.tp_size 4: num_key_value_heads 2 of architecture Llama cannot be shared evenly; use one of 1, 2",
    ),
    (
        {"architecture": {**GPT2, "n_inner": 121}, "parallel": {"tp_size": 5}},
        "num_attention_heads 12 and n_inner 121 of architecture GPT2 cannot be shared evenly; use 1",
    ),
    (
        {"architecture": {"type": "electra", "num_attention_heads": 4}, "objective": {"type": "replaced_token"}},
        "parallel.tp_size 2: num_attention_heads 1 of architecture Electra (of the objective's second model) cannot be "
        "shared evenly; use 1",
    ),
    (
        {"architecture": {"type": "olmo2"}},
        "parallel.tp_size 2: processes share the layers of bert, electra, eurobert, gemma3_text, gpt2, gptj, llama, "
        "mistral, modernbert_decoder, qwen3, roberta, but architecture Olmo2 cannot: its norms of queries and keys run "
        'over all heads together. Set it to 1; "engine": "fsdp" splits',
    ),
    ({"architecture": {"type": "t5"}, "objective": {"type": "span_corruption"}}, "architecture T5 does not define how"),
    (
        {"parallel": {"sequence_parallel": True}},
        "sequence_parallel, Megatron-LM's sharing of norms and dropout among the processes of tp_size, needs tp_size "
        "above 1. sp_size is something else",
    ),
    (
        {"parallel": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "pp_schedule": "zero_bubble"}},
        'sequence_parallel gathers activations again in each backward, which pp_schedule "zero_bubble" cuts in two',
    ),
    (
        {"parallel": {"tp_size": 3, "sequence_parallel": True}},
        "data.sequence_length: parallel.sequence_parallel among parallel.tp_size 3 splits positions evenly: expected a "
        "multiple of 3, got 32; the nearest: 30 and 33",
    ),
    (
        {"parallel": {"tp_size": 2, "sp_size": 2, "sequence_parallel": True}, "data": {**DATA, "sequence_length": 30}},
        "parallel.tp_size 2 with sp_size 2 splits positions evenly: expected a multiple of 4, got 30; the nearest: 28 "
        "and 32",
    ),
    (
        {
            "parallel": {"tp_size": 3, "sequence_parallel": True},
            "data": {**DATA, "sequence_length": 48},
            "architecture": {"type": "bert"},
            "objective": {"type": "masked_lm", "layout": "pairs", "next_sentence": True},
        },
        'parallel.sequence_parallel among parallel.tp_size 3: in the layout "pairs" rows are as wide as the longest of '
        "their batch, in multiples of 8, which 3 processes cannot split evenly; use a divisor of 8",
    ),
    (
        {"parallel": {"tp_size": 2, "engine": "deepspeed", "zero_stage": 1}},
        'tp_size 2 needs engine "ddp" or "fsdp", got "deepspeed"; use "engine": "fsdp", which divides what ZeRO',
    ),
]


def read(**changes: Any) -> Parameters:
    """The parameters of a run in replicas of two, with `changes`."""
    base = {
        "data": DATA, "architecture": GPT2, "objective": CAUSAL,
        "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"}, "batch_size": {"-1": 8}, "max_steps": 2,
        "parallel": {"tp_size": 2},
    }  # fmt: skip
    return Parameters.from_dict({**base, **changes}, source="test")


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_incompatible_settings_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"tp_size": 12}},
        {"parallel": {"tp_size": 4, "sp_size": 3, "sequence_parallel": True}, "data": {**DATA, "sequence_length": 24}},
        {"architecture": LLAMA},
        {"optimizer": {"type": "lion"}},
        {"activation_checkpointing": "selective", "precision": "fp16"},
        {"architecture": LLAMA, "precision": "fp8", "parallel": {"tp_size": 2, "engine": "fsdp", "pp_size": 2}},
        {
            "architecture": {"type": "bert"},
            "objective": {"type": "masked_lm", "layout": "pairs", "next_sentence": True},
        },
    ],
)
def test_compatible_settings_are_accepted(changes: dict[str, Any]) -> None:
    read(**changes)


def test_an_architecture_that_reads_several_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    divide = GPT2Architecture.tensor_partition
    monkeypatch.setattr(GPT2Architecture, "tensor_partition", lambda self: replace(divide(self), positions=False))
    read()
    with pytest.raises(UserError, match=r"parallel.sequence_parallel: .* GPT2 read several positions .* set it to fal"):
        read(parallel={"tp_size": 2, "sequence_parallel": True})


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical(store: Path, validation_store: Path, tmp_path: Path) -> None:
    """Kill -9 of the second process of a replica, with dropout everywhere; `--set` selects the engine, in which each
    process has dropout of its own at its own positions."""
    settings = toy.parameters(store, validation_store, logging_steps=3)
    asked = ("--set", "parallel.tp_size=2", "--set", "parallel.sequence_parallel=true")
    _, said = kill_and_resume(settings, tmp_path, *asked, nodes=(2,))
    assert "ddp, tp_size 2, sequence_parallel, fp32" in said
