"""Runs whose processes divide positions: killed, resumed, continued by one process and back, exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from killed_runs import kill_and_resume
from transformers import AutoModelForCausalLM

LLAMA = {
    "type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {
    "type": "gpt2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
SHARED = {"parallel": {"sp_size": 2}}


def settings(store: Path, validation: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "architecture": LLAMA, "objective": {"type": "causal_lm", "append_eos": False}, "batch_size": {"-1": 6},
        "micro_batch_size": 4, "max_steps": 6, "checkpoint": {"save_steps": 3}, "schedule": {"type": "constant"},
        "evaluation": {"steps": 3, "batches": 2},
    }  # fmt: skip
    return toy.parameters(store, validation, **{**base, **changes})


def validation(out: Path) -> dict[int, float]:
    return {step: line["loss"] for step, line in toy.records(out, "validation").items()}


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical(store: Path, validation_store: Path, tmp_path: Path) -> None:
    """With dropout, which each process draws for its own positions and heads."""
    given = settings(store, validation_store, architecture=GPT2, **SHARED)
    kill_and_resume(given, tmp_path, nodes=(2,), after=5, resumed_at=3)


@pytest.fixture(scope="module")
def alone(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    toy.train(settings(store, validation_store), out)
    return out


@pytest.mark.slow
def test_two_processes_and_one_continue_each_others_runs(
    alone: Path, store: Path, validation_store: Path, tmp_path: Path
) -> None:
    """Three steps on two processes, three on one, two on two: the same as on one alone, with validation."""
    out, given = tmp_path / "run", settings(store, validation_store)
    toy.train({**given, "max_steps": 3}, out, "--set", "parallel.sp_size=2", nodes=(2,))
    said = toy.train(given, out)
    assert "resumed from" in said and "parameter parallel.sp_size: was 2, is 1" in said
    for step, (loss, norm) in toy.losses(alone).items():
        assert toy.losses(out)[step] == pytest.approx((loss, norm), rel=1e-5), step
        assert toy.records(out)[step]["tokens"] == toy.records(alone)[step]["tokens"]
    assert validation(out) == pytest.approx(validation(alone), rel=1e-5)
    longer = {**given, "max_steps": 8}
    toy.train({**longer, **SHARED}, out, nodes=(2,))
    toy.train(longer, alone)
    for step in (7, 8):
        assert toy.losses(out)[step] == pytest.approx(toy.losses(alone)[step], rel=1e-5), step
    models = [AutoModelForCausalLM.from_pretrained(each / "checkpoints/step-00000008/model") for each in (out, alone)]
    ids = torch.arange(6, 26)[None]
    with torch.no_grad():
        mine, theirs = (model(ids).logits for model in models)
    assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_muon_sees_whole_matrices(store: Path, validation_store: Path, tmp_path: Path) -> None:
    """Muon computes in bf16: gradients that differ in their last bits give updates that differ by more."""
    given = settings(store, validation_store, optimizer={"type": "muon", "learning_rate": 0.01}, evaluation=None)
    toy.train({**given, **SHARED}, tmp_path / "two", nodes=(2,))
    toy.train(given, tmp_path / "one")
    one, two = toy.losses(tmp_path / "one"), toy.losses(tmp_path / "two")
    assert one.keys() == two.keys() and one[1] == pytest.approx(two[1], rel=1e-6)
    for step in one:
        assert two[step][0] == pytest.approx(one[step][0], rel=2e-3), step


@pytest.mark.slow
def test_a_number_of_processes_that_is_no_multiple_is_refused(
    store: Path, validation_store: Path, tmp_path: Path
) -> None:
    said = toy.train({**settings(store, validation_store), **SHARED}, tmp_path / "run", nodes=(3,), code=2)
    assert "2 processes work on the same rows, but the run has 3 processes" in said
