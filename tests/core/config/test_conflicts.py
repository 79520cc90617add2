"""Settings that exclude each other are refused with the parameters, before a store is opened or a model is built."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from terakoya.components import Architecture, Optimizer
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_japanese.translate import translator

BERT = {
    "type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
GPTJ = {
    "type": "gptj", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "rotary_dim": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
DEEPSPEED = {"engine": "deepspeed", "zero_stage": 1}
FSDP = {"engine": "fsdp"}


class Mixing(Architecture):
    """An architecture that neither defines its blocks nor keeps documents apart."""


class Everything(Optimizer):
    """An optimizer whose updates depend on all weights."""

    elementwise: ClassVar[bool] = False


def read(**changes: Any) -> Parameters:
    """The parameters of a run with `changes`."""
    base = {
        "data": {"train": ["store"], "sequence_length": 32}, "architecture": BERT, "objective": {"type": "masked_lm"},
        "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"}, "batch_size": {"-1": 8}, "max_steps": 2,
    }  # fmt: skip
    own = {key: value for key, value in changes.items() if isinstance(value, Architecture | Optimizer)}
    written = {key: value for key, value in changes.items() if key not in own}
    if not own:
        return Parameters.from_dict({**base, **written}, source="test")
    read = Parameters.from_dict({**base, **written, "activation_checkpointing": None}, source="test")
    return Parameters.model_validate({**dict(read), **changes, "objective": read.objective})


STREAM = {"type": "masked_lm", "layout": "stream"}
MUP = {"mup": {"base_width": 8}}
CONFLICTS: list[tuple[dict[str, Any], str]] = [
    (
        {**MUP, "architecture": {"type": "t5"}, "objective": {"type": "span_corruption"}},
        "mup: architecture T5 does not say which of its sizes are widths (`mup_widths`); bert, deberta, ",
    ),
    (
        {**MUP, "optimizer": {"type": "adafactor"}},
        "mup: is for optimizers whose updates have the size of the learning rate, as Adam's do, got Adafactor; use",
    ),
    ({**MUP, "start_from": "model", "lora": {}}, "mup: is for weights that are trained whole, and lora"),
    ({"loss_scaling": {}}, 'loss_scaling: is for precision "fp16", got precision "auto"'),
    ({"loss_scaling": {}, "precision": "bf16"}, 'loss_scaling: is for precision "fp16", got precision "bf16"'),
    (
        {"loss_scaling": {"fixed": 128.0, "hysteresis": 2}, "precision": "fp16"},
        "loss_scaling: fixed 128 leaves hysteresis without effect",
    ),
    (
        {"loss_scaling": {"init_scale": 0.5}, "precision": "fp16"},
        "loss_scaling: init_scale: expected at least min_scale, 1, got 0.5",
    ),
    ({"loss_scaling": {"growth_factor": 1.0}, "precision": "fp16"}, "loss_scaling.growth_factor: expected"),
    (
        {"spikes": {"action": "skip"}, "parallel": {"engine": "deepspeed", "zero_stage": 1}},
        'spikes.action: "skip" needs the gradient norm before the update, but ZeRO stage 1 computes it within',
    ),
    ({"attention": "flash", "precision": "fp32"}, 'attention: flash needs precision "bf16" or "fp16", got "fp32"'),
    (
        {"attention": "flash", "precision": "bf16", "architecture": GPTJ, "objective": {"type": "causal_lm"}},
        "attention: flash is for models that use Transformers' AttentionInterface, which GPTJ does not",
    ),
    ({"precision": "fp8", "parallel": DEEPSPEED}, 'precision: "fp8" is for parallel.engine "ddp" or "fsdp", got "d'),
    ({"precision": "fp8", "compile": "off"}, 'precision: "fp8" is slower than "bf16" without compiled kernels'),
    ({"precision": "fp8", "compile": "off"}, 'got compile: "off"; use "compile": "auto"'),
    ({"architecture": Mixing(), "objective": STREAM, "precision": "fp8"}, "fp8\" needs compiled blocks, and architec"),
    *(
        ({"cuda_graphs": True, "compile": mode}, f'which compile "{mode}" excludes; use "cuda_graphs": "auto"')
        for mode in ("blocks", "off")
    ),
    ({"cuda_graphs": True, "parallel": FSDP}, 'cuda_graphs: none can be recorded: they record what is comp'),
    ({"cuda_graphs": True, "parallel": {"sp_size": 2}}, "with parallel.sp_size 2 only blocks are compiled"),
    ({"cuda_graphs": True, "activation_checkpointing": "full"}, "recorded: activation_checkpointing saves memory"),
    (
        {"cuda_graphs": True, "objective": {"type": "masked_lm", "layout": "lines"}},
        'in the layout "lines" rows are as wide as the longest of their batch; use "cuda_graphs": "auto"',
    ),
    (
        {"cuda_graphs": True, "architecture": {"type": "t5"}, "objective": {"type": "span_corruption"}},
        'as wide as the longest of their batch; use "cuda_graphs": "auto"',
    ),
    ({"architecture": Mixing()}, 'documents in one row apart; use objective.layout "stream" or "lines" or "pairs"'),
    (
        {"architecture": Mixing(), "objective": {"type": "causal_lm"}},
        'architecture Mixing cannot keep documents in one row apart; use objective.layout "stream" or "megatron"',
    ),
    (
        {"architecture": Mixing(), "objective": STREAM, "activation_checkpointing": "full"},
        "activation_checkpointing: architecture Mixing does not define `blocks`",
    ),
    (
        {"architecture": Mixing(), "objective": STREAM, "parallel": FSDP},
        'parallel.engine "fsdp": architecture Mixing does not define `blocks`; use "engine": "ddp"',
    ),
    (
        {"optimizer": Everything(), "parallel": FSDP},
        'parallel.engine "fsdp": optimizer Everything needs all weights at once (it is neither elementwise nor tens',
    ),
    *(
        (
            {"optimizer": Everything(), "parallel": {"engine": "deepspeed", "zero_stage": stage}},
            f"parallel.zero_stage {stage}: optimizer Everything needs all weights at once",
        )
        for stage in (1, 2, 3)
    ),
    ({"optimizer": Everything(), "parallel": {"tp_size": 2}}, "parallel.tp_size 2: optimizer Everything needs all wei"),
    (
        {"optimizer": {"type": "muon"}, "parallel": {**DEEPSPEED, "offload_optimizer_device": "cpu"}},
        "parallel.offload_optimizer_device: optimizer Muon needs whole parameters",
    ),
    (
        {"activation_checkpointing": "selective", "parallel": {"engine": "deepspeed", "zero_stage": 3}},
        'activation_checkpointing: "selective" is for zero_stage 0 to 2',
    ),
    ({"parallel": {"zero_stage": 1}}, 'zero_stage 1 needs engine "deepspeed"'),
    ({"parallel": {"engine": "deepspeed"}}, 'engine "deepspeed" needs zero_stage'),
    ({"data": {"train": ["store"], "sequence_length": 65}}, "data.sequence_length: expected at most 64"),
    ({"evaluation": {"steps": 1}}, "evaluation: there is nothing to evaluate on"),
    ({"schedule": {"type": "plateau"}}, "schedule: Plateau depends on validation losses"),
    (
        {"data": {"train": ["a"], "sequence_length": 32, "stages": [{"from_step": 2, "train": ["b"]}]},
         "max_steps": None, "epochs": 1},
        "epochs: with data.stages",
    ),
    ({"parallel": {"dp_shard_size": 2}}, 'dp_shard_size 2 needs engine "fsdp", got "ddp"'),
    ({"parallel": {**DEEPSPEED, "pp_size": 2}}, 'pp_size 2 needs engine "ddp" or "fsdp", got "deepspeed"'),
    ({"parallel": {"sp_size": 2, "cp_size": 2}}, "sp_size 2 and cp_size 2 both divide the positions of rows"),
    ({"parallel": {"pp_stages_per_process": 2}}, "pp_stages_per_process 2 needs pp_size of at least 2, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), CONFLICTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_conflict_is_refused_with_this_message(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises((UserError, ValidationError)) as caught:
        read(**changes)
    assert expected in str(caught.value)


def test_conflicts_are_told_in_japanese(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their parts, such as what cannot be compiled, the sizes that fit and what to do."""
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    translated = translator()
    more: list[dict[str, Any]] = [
        {"parallel": {"tp_size": 3}}, {"parallel": {"tp_size": 2}, "compile": "blocks"}, {"parallel": {"pp_size": 2}},
        {"parallel": {"tp_size": 2}, "architecture": {"type": "t5"}, "objective": {"type": "span_corruption"}},
        {"parallel": {"tp_size": 2}, "architecture": {"type": "olmo2"}, "objective": {"type": "causal_lm"}},
        {"parallel": {"sp_size": 2}, "architecture": GPTJ, "objective": {"type": "causal_lm"}},
        {"parallel": {"sp_size": 3}}, {"parallel": {"cp_size": 3}}, {"parallel": {"offload_param_device": "cpu"}},
        {"phases": [{"steps": 2}, {"steps": 3}]}, {"phases": [{"share": 0.4}, {"share": 0.4}]},
        {"start_from": {"folder": "m", "vocabulary": "extend"}, "lora": {}},
    ]  # fmt: skip
    for changes in (*more, *(each for each, _ in CONFLICTS)):
        with pytest.raises((UserError, ValidationError)) as caught:
            read(**changes)
        told = caught.value.errors()[0]["msg"] if isinstance(caught.value, ValidationError) else str(caught.value)
        shown = translated(told.removeprefix("Value error, "))
        english = re.search(" (the|of|and|or|is|are|with|at|got|needs)( |$)|(^| )(use|set|give|expected) ", shown)
        assert english is None, shown


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16"},
        {"precision": "fp16", "loss_scaling": {"fixed": 128.0}},
        {"precision": "fp16", "loss_scaling": {"hysteresis": 2}, "parallel": DEEPSPEED},
        {"attention": "flash", "precision": "fp16"},
        {"precision": "fp8"},
        {"precision": "fp8", "compile": "whole"},
        {"precision": "fp8", "parallel": FSDP},
        {"cuda_graphs": True, "compile": "whole"},
        {"cuda_graphs": True, "precision": "bf16", "objective": STREAM},
        {"architecture": Mixing(), "objective": STREAM},
        {"activation_checkpointing": "selective", "precision": "fp16", "parallel": DEEPSPEED},
        {"activation_checkpointing": "full", "parallel": {"engine": "deepspeed", "zero_stage": 3}},
        *(
            {"optimizer": {"type": name}, "parallel": parallel}
            for name in ("muon", "adafactor", "stable_adamw")
            for parallel in (FSDP, {"tp_size": 2}, *({"engine": "deepspeed", "zero_stage": each} for each in range(4)))
        ),
        {"optimizer": Everything(), "parallel": {"engine": "deepspeed", "zero_stage": 0}},
        {"max_grad_norm": 0.0, "parallel": DEEPSPEED},
        {"activation_checkpointing": "selective", "precision": "fp16", "parallel": FSDP},
        {"optimizer": {"type": "lion"}, "parallel": FSDP},
    ],
)
def test_settings_without_conflict_are_read(changes: dict[str, Any]) -> None:
    read(**changes)
