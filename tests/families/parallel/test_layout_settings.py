"""Settings that are incompatible with a way to divide a model are refused before anything is built, with the nearest
compatible ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_plugins.architectures.gpt2 import GPT2 as GPT2Architecture

GPT2 = {"type": "gpt2", "num_attention_heads": 12, "hidden_size": 48, "n_inner": 120, "num_hidden_layers": 5,
        "max_position_embeddings": 64}  # fmt: skip
LLAMA = {"type": "llama", "num_attention_heads": 8, "hidden_size": 48, "num_key_value_heads": 2,
         "intermediate_size": 96}  # fmt: skip
SIX_HEADS = {"type": "llama", "num_attention_heads": 6, "hidden_size": 48}
BERT = {"type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
GPTJ = {"type": "gptj", "hidden_size": 16, "num_attention_heads": 2, "rotary_dim": 4}
T5 = {"architecture": {"type": "t5", "d_model": 16, "num_heads": 2}, "objective": {"type": "span_corruption"}}
MASKED, LINES = {"type": "masked_lm"}, {"type": "masked_lm", "layout": "lines"}
PAIRS = {"type": "masked_lm", "layout": "pairs", "next_sentence": True}
TP, PP, SP, CP = {"tp_size": 2}, {"pp_size": 2}, {"sp_size": 2}, {"cp_size": 2}
ZERO = {"engine": "deepspeed", "zero_stage": 1}


def read(parallel: dict[str, Any], *, length: int = 48, **changes: Any) -> Parameters:
    """The parameters of a run that is divided as `parallel` says."""
    base = {
        "data": {"train": ["store"], "sequence_length": length}, "architecture": GPT2,
        "objective": {"type": "causal_lm"}, "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
        "batch_size": {"-1": 8}, "max_steps": 2, "parallel": parallel,
    }  # fmt: skip
    return Parameters.from_dict({**base, **changes}, source="test")


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tp_size": 8}, {}, "parallel.tp_size 8: num_attention_heads 12 of .* GPT2 .* one of 1, 2, 3, 4, 6, 12"),
    ({"tp_size": 4}, {"architecture": LLAMA}, "parallel.tp_size 4: num_key_value_heads 2 .* use one of 1, 2"),
    ({"tp_size": 5}, {"architecture": {**GPT2, "n_inner": 121}}, "num_attention_heads 12 and n_inner 121 .* use 1"),
    (TP, {"architecture": {"type": "electra", "num_attention_heads": 4}, "objective": {"type": "replaced_token"}},
     "num_attention_heads 1 of architecture Electra .of the objective's second model. .* use 1"),
    (TP, {"architecture": {"type": "olmo2"}}, "but architecture Olmo2 cannot: its norms of .* over all heads together"),
    (TP, T5, "architecture T5 does not define how"),
    ({"sequence_parallel": True}, {}, "needs tp_size above 1. sp_size is something else"),
    ({**TP, **PP, "sequence_parallel": True, "pp_schedule": "zero_bubble"}, {}, "pp_schedule .zero_bubble. cuts in"),
    ({"tp_size": 3, "sequence_parallel": True}, {"length": 32}, "a multiple of 3, got 32; the nearest: 30 and 33"),
    ({**TP, **SP, "sequence_parallel": True}, {"length": 30}, "tp_size 2 with sp_size 2 .* 4, got 30; .* 28 and 32"),
    ({"tp_size": 3, "sequence_parallel": True}, {"architecture": {"type": "bert"}, "objective": PAIRS},
     'in the layout "pairs" rows are as wide as the longest .* which 3 processes cannot split .* a divisor of 8'),
    ({**TP, **ZERO}, {}, 'tp_size 2 needs engine "ddp" or "fsdp", got "deepspeed"; use "engine": "fsdp", which'),
    (PP, {"architecture": BERT, "objective": MASKED}, "Bert does not define how it is cut .* gpt2, gptj, llama"),
    ({"pp_size": 6}, {}, "parallel.pp_size 6: 6 stages need at least 6 blocks, but .* GPT2 has 5; use pp_size 5"),
    ({**PP, "pp_stages_per_process": 3}, {}, "3: 6 stages .* GPT2 has 5; use pp_stages_per_process 2"),
    ({"pp_stages_per_process": 2}, {}, "pp_stages_per_process 2 needs pp_size of at least 2, got 1"),
    ({"pp_schedule": "zero_bubble"}, {}, 'pp_schedule "zero_bubble" needs pp_size of at least 2, got 1'),
    ({**PP, "pp_schedule": "zero_bubble"}, {"activation_checkpointing": "full"}, "would compute a block again"),
    ({**PP, "pp_schedule": "zero_bubble"}, {"precision": "fp8"}, 'precision: "fp8" needs compiled blocks'),
    (PP, {"frozen_layers": 3}, "the first of 2 stages has 3 of 5 blocks .* expected at most 2, got 3"),
    ({**PP, **ZERO}, {}, 'pp_size 2 needs engine "ddp" or "fsdp", got "deepspeed"; use "engine": "fsdp"'),
    (SP, {"length": 47}, "parallel.sp_size 2 .* a multiple of 2, got 47; the nearest: 46 and 48"),
    ({"sp_size": 3}, {"length": 64}, "expected a multiple of 3, got 64; the nearest: 63"),
    ({"sp_size": 4}, {"architecture": SIX_HEADS}, "6 attention heads of Llama .* rows of 48 tokens use one of 2, 3, 6"),
    ({"sp_size": 4}, {"architecture": SIX_HEADS, "length": 47}, "with rows of 47 tokens use 1"),
    (SP, {"architecture": GPTJ}, "models that use Transformers' AttentionInterface, which GPTJ does not; set it to 1"),
    (SP, T5, "which T5 does not"),
    (SP, {"architecture": {**BERT, "type": "electra", "embedding_size": 16}, "objective": {"type": "replaced_token"}},
     "parallel.sp_size 2: ReplacedToken with these settings needs whole rows; set it to 1"),
    (SP, {"architecture": BERT, "objective": PAIRS}, "MaskedLM with these settings needs whole rows"),
    (SP, {"precision": "fp8"}, 'precision: "fp8" scales the tensors of each process separately'),
    ({**SP, **ZERO}, {}, 'sp_size 2 needs engine "ddp" or "fsdp", got "deepspeed"'),
    ({**SP, **CP}, {}, "sp_size 2 and cp_size 2 both divide the positions of rows"),
    (CP, {"length": 47}, "parallel.cp_size 2 splits .* a multiple of 2, got 47; the nearest: 46 and 48"),
    (CP, {"architecture": GPTJ}, "parallel.cp_size 2: is for models that use"),
    (CP, {"precision": "fp8"}, "parallel.cp_size 2 splits them"),
    ({"sp_size": 3}, {"architecture": {**BERT, "num_attention_heads": 3, "hidden_size": 24}, "objective": LINES},
     'in the layout "lines" rows are as wide as the longest .* use a divisor of 8, or another objective.layout'),
]  # fmt: skip


@pytest.mark.parametrize(("parallel", "changes", "said"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_incompatible_settings_are_refused(parallel: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(parallel, **changes)


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ({"tp_size": 12}, {}),
        ({"tp_size": 4, "sp_size": 3, "sequence_parallel": True}, {"length": 24}),
        (TP, {"architecture": LLAMA}),
        (TP, {"optimizer": {"type": "lion"}}),
        (TP, {"activation_checkpointing": "selective", "precision": "fp16"}),
        ({**TP, **PP, "engine": "fsdp"}, {"architecture": LLAMA, "precision": "fp8"}),
        (TP, {"architecture": {"type": "bert"}, "objective": PAIRS}),
        (SP, {"architecture": BERT, "objective": LINES}),
        *(({"sp_size": size}, {"architecture": SIX_HEADS}) for size in (2, 3, 6)),
        ({"cp_size": 8}, {"architecture": SIX_HEADS}),
    ],
)
def test_compatible_settings_are_accepted(parallel: dict[str, Any], changes: dict[str, Any]) -> None:
    assert read(parallel, **changes).parallel.replica_size > 1


def test_an_architecture_that_reads_several_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    divide = GPT2Architecture.tensor_partition
    monkeypatch.setattr(GPT2Architecture, "tensor_partition", lambda self: replace(divide(self), positions=False))
    read(TP)
    with pytest.raises(UserError, match=r"parallel.sequence_parallel: .* GPT2 read several positions .* set it to fal"):
        read({**TP, "sequence_parallel": True})
