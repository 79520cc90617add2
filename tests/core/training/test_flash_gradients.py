"""A whole model with flash attention has the loss and the gradients that it has with sdpa, in every family that takes
flash. The kernel is a slow one for the CPU, behind torch's own operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dropouts import DROPOUTS
from flash_on_a_cpu import flash_on_a_cpu
from torch import Tensor, nn

from terakoya.components import Batch
from terakoya.config.parameters import Parameters
from terakoya.plugins import registry
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import collate_rows, to_device
from terakoya.training.loss import weighted_loss
from terakoya.training.model.build import build_module_for_training
from terakoya_contract import toy as toy_model

CPU = torch.device("cpu")
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("bert", "masked_lm"): {}, ("bert", "retromae"): {}, ("electra", "replaced_token"): {},
    ("eurobert", "masked_lm"): {}, ("modernbert", "masked_lm"): {},
    ("modernbert", "replaced_token"): {"sharing": "none"}, ("modernbert", "retromae"): {},
    ("roberta", "masked_lm"): {}, ("gemma3_text", "causal_lm"): {}, ("gpt2", "causal_lm"): {},
    ("llama", "causal_lm"): {}, ("llama", "instruction"): {}, ("mistral", "causal_lm"): {},
    ("modernbert_decoder", "causal_lm"): {}, ("olmo2", "causal_lm"): {}, ("qwen3", "causal_lm"): {},
}  # fmt: skip
"""Settings of the objective, by architecture and objective."""
FURTHER: dict[str, dict[str, Any]] = {"gemma3_text": {"query_pre_attn_scalar": 32}}
"""Settings of the architecture: a scale of scores that the kernel does not have."""


def build(name: str, objective: str, settings: dict[str, Any]) -> Parameters:
    kind, learned = (registry().component(*each) for each in (("architectures", name), ("objectives", objective)))
    no_dropout = {key: 0.0 for key in DROPOUTS if key in kind.model_fields}
    return Parameters.from_dict(
        {
            "data": {"train": ["none"], "sequence_length": toy_model.SEQUENCE_LENGTH},
            "architecture": {"type": name, **toy_model.values(kind), **no_dropout, **FURTHER.get(name, {})},
            "objective": {"type": objective, **toy_model.values(learned), **settings},
            "optimizer": {"type": "adamw", "learning_rate": 1e-3},
            "schedule": {"type": "constant"}, "batch_size": {"-1": 4}, "max_steps": 1,
        },
        source=name,
    )  # fmt: skip


def loss_and_gradients(module: nn.Module, parameters: Parameters, batch: Batch, backend: str) -> dict[str, Tensor]:
    """The loss, and the gradient of each weight that has one, by name."""
    attention.use(module, backend)
    module.zero_grad()
    sums = module(to_device(batch, CPU, flash=backend == "flash"))
    loss = weighted_loss(sums, parameters.objective.terms(), batch.counts)
    loss.backward()
    weights = dict(module.named_parameters())
    return {"": loss.detach()} | {name: each.grad for name, each in weights.items() if each.grad is not None}


def test_no_family_that_takes_flash_is_left_out() -> None:
    names = registry().names("architectures")
    kinds = {name: registry().component("architectures", name) for name in names}
    assert {name for name, _ in CASES} == {
        name for name, kind in kinds.items() if kind.document_masking == "attention_interface"
    }


@pytest.mark.parametrize(("name", "objective"), CASES)
def test_flash_has_the_gradients_of_sdpa(name: str, objective: str, tmp_path: Path) -> None:
    """To the last digits in float64; in float32 but for rounding. Rows have several documents, and padding."""
    parameters = build(name, objective, CASES[name, objective])
    layout = parameters.objective.row_layout()
    source = RowSource(
        toy_model.make_store_for(layout, tmp_path), layout, sequence_length=toy_model.SEQUENCE_LENGTH, seed=11
    )
    batch = collate_rows(parameters.objective, toy_model.VOCABULARY, source.load(0, np.arange(4)), 5, source)
    starts = attention.boundaries(batch.arrays["document_ids"])[0]
    assert len(np.unique(starts)) > 1 + len(batch.arrays["document_ids"]), "rows have several documents"
    torch.manual_seed(0)
    module = build_module_for_training(parameters, toy_model.VOCABULARY).train()
    with torch.no_grad():
        for weight in module.parameters():  # else scores are near 0, where all positions count alike
            weight.add_(torch.randn_like(weight), alpha=0.1)
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        module.to(dtype)
        expected = loss_and_gradients(module, parameters, batch, attention.MASKED)
        with flash_on_a_cpu():
            found = loss_and_gradients(module, parameters, batch, "flash")
        assert found.keys() == expected.keys()
        assert abs(found[""] - expected[""]) <= most * expected[""]
        difference, whole = (
            torch.cat([each[key].flatten().double() for key in found if key]).norm()
            for each in ({key: found[key] - expected[key] for key in found}, expected)
        )
        assert difference <= most * whole
        if dtype == torch.float64:  # each weight by itself, but for those without an effect, as biases of keys
            assert all(
                (found[key] - expected[key]).norm() <= most * expected[key].norm().clamp(min=1e-3 * whole)
                for key in found
                if key
            )
