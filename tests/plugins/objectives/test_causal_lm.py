"""Causal language modelling against plain Transformers and explicit formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_rows import tensors
from pydantic import ValidationError

from terakoya.components.rows import Rows
from terakoya.errors import UserError
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.architectures import attention
from terakoya_contract.toy import VOCABULARY, make_store
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.gpt2 import GPT2
from terakoya_plugins.objectives.causal_lm import CausalLM

MODEL = GPT2(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip


def rows_of(folder: Path, objective: CausalLM) -> Rows:
    """The first four rows, which are full in layouts that join documents."""
    source = RowSource(make_store(folder / "toy"), objective.row_layout(), sequence_length=32, seed=1, shuffle=False)
    return source.load(0, np.arange(4))


def module_of(objective: CausalLM) -> Any:
    torch.manual_seed(0)
    module = objective.build(MODEL, VOCABULARY)
    attention.use(module, "sdpa")
    return module


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_head_positions_does_not_change_the_results(tmp_path: Path, training: bool, z_loss: float) -> None:
    rows = rows_of(tmp_path, CausalLM())
    found = []
    for positions in (None, 30, 1000):
        objective = CausalLM(head_positions=positions, z_loss=z_loss)
        module = module_of(objective).train(training)
        sums = module(tensors(objective.collate(rows, VOCABULARY)))
        assert set(sums) == set(objective.terms()) - ({"token_accuracy"} if training else set())
        torch.stack(
            [sums[name] for name, term in objective.terms().items() if term.weight is not None]
        ).sum().backward()
        gradients = [weight.grad for weight in module.parameters()]
        found.append(([float(each.detach()) for each in sums.values()], gradients))
    for values, gradients in found[1:]:
        assert values == pytest.approx(found[0][0], rel=1e-6)
        for one, other in zip(gradients, found[0][1], strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7


def test_head_positions_stores_no_logits(tmp_path: Path) -> None:
    """No tensor that the head stores for its backward is as large as the logits of all positions."""
    sizes: list[int] = []

    def size(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    largest = {}
    for positions in (None, 8):
        objective = CausalLM(head_positions=positions)
        module, batch = (
            module_of(objective),
            tensors(objective.collate(rows_of(tmp_path / str(positions), objective), VOCABULARY)),
        )
        hidden = module.architecture.hidden(module.model, batch).flatten(0, 1).detach().requires_grad_()
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(size, lambda each: each):
            if positions is None:
                module._score(hidden, batch["labels"].flatten())
            else:
                for part, labels in zip(hidden.split(8), batch["labels"].flatten().split(8), strict=True):
                    module._checkpointed_score(part, labels)
        largest[positions] = max(sizes, default=0)
    assert largest[None] >= 4 * 32 * VOCABULARY.size and largest[8] < 4 * 32 * VOCABULARY.size


def test_head_positions_computes_no_part_twice(tmp_path: Path) -> None:
    """Without a z loss gradients are formed in the forward; they are multiplied by what the loss is multiplied by, and
    exist once."""
    objective = CausalLM(head_positions=8)
    module, rows = module_of(objective).train(), rows_of(tmp_path, objective)
    calls = []
    score = module._score
    module._score = lambda *part: calls.append(len(part[0])) or score(*part)
    loss = module(tensors(objective.collate(rows, VOCABULARY)))["lm_loss"]
    formed = len(calls)
    (3 * loss).backward(retain_graph=True)
    assert len(calls) == formed == -(-rows.tokens.size // 8)
    tripled = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    module(tensors(objective.collate(rows, VOCABULARY)))["lm_loss"].backward()
    for one, other in zip(tripled, module.parameters(), strict=True):
        expected = 3 * other.grad
        assert (one - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-6  # sums of another order
    with pytest.raises(RuntimeError, match="gone after a backward"):
        loss.backward()


def test_weights_that_are_there_only_while_their_module_runs_get_their_gradients_in_the_backward(
    tmp_path: Path,
) -> None:
    """ZeRO's third stage marks its weights, of which no gradient can be kept from the forward."""
    objective = CausalLM(head_positions=8)
    rows, gradients = rows_of(tmp_path, objective), []
    for partitioned in (False, True):
        module = module_of(objective).train()
        calls = []
        score = module._score
        module._score = lambda *part, score=score, calls=calls: calls.append(1) or score(*part)
        if partitioned:
            module.model.get_output_embeddings().weight.ds_id = 0
        loss = module(tensors(objective.collate(rows, VOCABULARY)))["lm_loss"]
        formed = len(calls)
        loss.backward()
        assert (len(calls) > formed) == partitioned, "parts are computed again in the backward"
        gradients.append([weight.grad for weight in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_z_loss_is_a_separate_term(tmp_path: Path) -> None:
    objective = CausalLM(z_loss=1e-4)
    rows = rows_of(tmp_path, objective)
    module, batch = module_of(objective).eval(), objective.collate(rows, VOCABULARY)
    arrays = tensors(batch)
    with torch.no_grad():
        sums = module(arrays)
        logits = module.architecture.logits(module.model, module.architecture.hidden(module.model, arrays)).double()
    used = arrays["labels"] >= 0
    expected = (logits.exp().sum(-1).log() ** 2)[used].sum()
    assert float(sums["z_loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert objective.terms()["z_loss"].weight == 1e-4 and objective.terms()["z_loss"].count == "targets"
    assert "z_loss" not in CausalLM().terms()
    correct = (logits.argmax(-1) == arrays["labels"])[used].sum()
    assert float(sums["token_accuracy"]) == float(correct)


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    derived = CausalLM().derive_metrics
    assert derived({"lm_loss": np.array(20.0)}, {"targets": 10}) == {"perplexity": pytest.approx(math.exp(2.0))}
    assert derived({"lm_loss": np.array(0.0)}, {"targets": 0}) == {}
    assert derived({"lm_loss": np.array(1e5)}, {"targets": 10}) == {}


def test_counts_and_the_mark_of_whole_rows(tmp_path: Path) -> None:
    for layout in ("packed", "stream", "megatron"):
        objective = CausalLM(layout=layout)  # type: ignore[arg-type]
        rows = rows_of(tmp_path / layout, objective)
        batch = objective.collate(rows, VOCABULARY)
        assert batch.counts["targets"] == np.count_nonzero(batch.arrays["labels"] >= 0)
        assert batch.counts["tokens"] == np.count_nonzero(rows.document_ids >= 0)
        assert (attention.WHOLE_ROWS in batch.arrays) == (layout != "packed")


def test_conflicting_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="megatron"):
        CausalLM(samples=10)
    with pytest.raises(ValidationError, match="no token follows an end"):
        CausalLM(eod_mask_loss=True)
    with pytest.raises(UserError, match="no head 'causal'"):
        CausalLM().build(Bert(), VOCABULARY)
