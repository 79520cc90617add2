"""Activations that wait on the host: the same bits as without, and the bytes that `estimate` expects there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from selection import at_night

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.setup import train_in_this_process
from terakoya_memory import host_activations
from terakoya_planning.estimate import estimate

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it

WIDE = {
    "architecture": {
        "type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": 32, "hidden_dropout_prob": 0.1,
    },
    "batch_size": {"-1": 10}, "micro_batch_size": 10, "max_steps": 3, "checkpoint": {"save_steps": 3},
}  # fmt: skip
GPT = {"architecture": {"type": "gpt2", "num_hidden_layers": 2}, "objective": {"type": "causal_lm"}}
SMALL = 1 << 12
"""As large as a hidden state of a few rows here."""
FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "bf16 stream": {"precision": "bf16"},
    "autocast": {"precision": "bf16", "autocast": True},
    "compiled": {"compile": "whole"},
    "compiled blocks": {"compile": "blocks", "activation_checkpointing": "full"},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_activations, "MIN_BYTES", SMALL)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each copy that a forward has made."""
    sizes: list[int] = []
    bring = host_activations._Waiting.bring_back

    def brought(waiting: Any) -> torch.Tensor:
        sizes.append(waiting.memory.nbytes)
        return bring(waiting)

    monkeypatch.setattr(host_activations._Waiting, "bring_back", brought)
    yield sizes


def trained(store: Path, out: Path, **changes: Any) -> Path:
    train_in_this_process(Parameters.from_dict(toy.parameters(store, **WIDE, **changes), source="memory"), out)
    return out


@pytest.mark.parametrize("name", at_night(FAMILIES, always=("plain", "recomputed", "bf16 stream")))
def test_no_bit_changes(store: Path, tmp_path: Path, moved: list[int], name: str) -> None:
    plain = trained(store, tmp_path / "plain", **FAMILIES[name])
    assert not moved
    mine = trained(store, tmp_path / "run", **FAMILIES[name], activation_offloading=True)
    assert len(moved) >= 3 * 2 and min(moved) >= SMALL
    assert toy.losses(mine) == toy.losses(plain)
    for kind in ("model", "optimizer"):
        first, second = (toy.saved(out / "checkpoints/step-00000003", kind) for out in (plain, mine))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def saved_bytes(parameters: Parameters, store: Path, out: Path) -> int:
    """The bytes of memory that autograd itself saves in a forward, each once, without weights and small tensors."""
    found: dict[int, torch.UntypedStorage] = {}
    lasting: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALL and storage.data_ptr() not in lasting:
            found[storage.data_ptr()] = storage
        return tensor.detach()

    from terakoya.training.engines.ddp import DDPEngine

    step = DDPEngine.micro_step

    def watched(engine: DDPEngine, batch: Any, loss_fn: Any, *, last: bool) -> Any:
        found.clear()
        lasting.update(each.untyped_storage().data_ptr() for each in engine.module.parameters())
        lasting.update(each.untyped_storage().data_ptr() for each in batch.values())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return step(engine, batch, loss_fn, last=last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPEngine, "micro_step", watched)
        train_in_this_process(parameters, out)
    return sum(storage.nbytes() for storage in found.values())


def test_estimate_knows_what_waits_on_the_host(store: Path, tmp_path: Path) -> None:
    plain = Parameters.from_dict(toy.parameters(store, **WIDE), source="plain")
    mine = plain.model_copy(update={"activation_offloading": True})
    before, after = estimate(plain).memory, estimate(mine).memory
    assert after.parts.get("activations", 0) < before.parts["activations"]
    assert not before.offloaded and set(after.offloaded) == {"activations"}
    expected = saved_bytes(plain, store, tmp_path / "run")
    assert after.offloaded["activations"] == pytest.approx(expected, rel=0.02)


def test_stages_of_a_pipeline_and_recorded_graphs_are_refused(store: Path) -> None:
    for changes, message in (
        ({**GPT, "parallel": {"pp_size": 2}}, r"activation_offloading: with parallel\.pp_size 2"),
        ({"cuda_graphs": True}, "activation_offloading saves memory, which they keep"),
    ):
        with pytest.raises(UserError, match=message):
            Parameters.from_dict(toy.parameters(store, **{**WIDE, **changes}, activation_offloading=True), source="p")
