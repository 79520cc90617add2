"""Activation checkpointing changes memory and nothing else: every loss, gradient and weight keeps its bits."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import transformers
from dropouts import DROPOUTS
from safetensors.torch import load_file
from selection import at_night
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terakoya.config.parameters import Parameters
from terakoya.plugins import registry
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import to_device
from terakoya.training.engines.engine import autocast_forward
from terakoya.training.model.build import build_module_for_training
from terakoya_contract.toy import VOCABULARY, make_rows, values
from terakoya_contract.toy import make_store as contract_store
from terakoya_memory.activation_checkpointing import checkpoint_block, is_expensive

KINDS = ("full", "selective")
SUBJECTS = [
    *((name, "masked_lm", "packed", 0.1) for name in ("bert", "roberta", "deberta", "deberta_v2", "modernbert")),
    *((name, "causal_lm", "packed", 0.1) for name in ("gpt2", "gptj", "llama", "qwen3")),
    ("electra", "replaced_token", "packed", 0.1),
    ("t5", "span_corruption", None, 0.1),
    ("bert", "masked_lm", "packed", 0.0),
    ("llama", "causal_lm", "packed", 0.0),
    ("gpt2", "causal_lm", "stream", 0.0),
]
"""Architecture, objective, layout, dropout: with and without dropout, torch uses different attention kernels."""


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return contract_store(tmp_path_factory.mktemp("rows") / "toy")


def parameters(
    architecture: str, objective: str, layout: str | None, kind: str | None, *, dropout: float, **changes: Any
) -> Parameters:
    """A run at toy size with every dropout at `dropout`."""
    component = registry().component("architectures", architecture)
    dropouts = {name: dropout for name in DROPOUTS if name in component.model_fields}
    assert dropouts, "every architecture here has a dropout"
    learnt = values(registry().component("objectives", objective))
    return Parameters.from_dict(
        {
            "data": {"train": ["store"], "sequence_length": 32},
            "architecture": {"type": architecture, **values(component), **dropouts},
            "objective": {"type": objective, **learnt, **({"layout": layout} if layout else {})},
            "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
            "batch_size": {"-1": 6}, "max_steps": 1, "activation_checkpointing": kind, **changes,
        },
        source="test",
    )  # fmt: skip


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all live tensors that were created while it was active."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.storages[storage.data_ptr()] = (weakref.ref(storage), storage.nbytes())
        return made

    def bytes(self) -> int:
        return sum(size for storage, size in self.storages.values() if storage() is not None)


def loss_and_gradients(
    settings: Parameters, store: TokenStore, backend: str = "sdpa"
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Returns sums, gradients by name, and the bytes of live tensors between forward and backward."""
    objective = settings.objective
    batch = objective.collate(make_rows(store, objective.row_layout()), VOCABULARY)
    tensors = to_device(batch, torch.device("cpu"), flash=False)
    module = build_module_for_training(settings, VOCABULARY).train()
    attention.use(module, backend)
    autocast_forward(module, torch.device("cpu"), settings.precision)
    torch.manual_seed(5)
    with LiveTensors() as alive:
        sums = module(tensors)
        loss = sum(sums[name] * term.weight for name, term in objective.terms().items() if term.weight)
        kept = alive.bytes()
    loss.backward()
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    assert len(gradients) > 10
    return {name: value.detach() for name, value in sums.items()}, gradients, kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "objective", "layout", "dropout"),
    at_night(SUBJECTS, always=[each for each in SUBJECTS if each[0] in ("modernbert", "electra", "t5")]),
)
def test_less_memory_is_used_and_nothing_else_changes(
    architecture: str, objective: str, layout: str | None, dropout: float, rows_of: TokenStore
) -> None:
    plain = parameters(architecture, objective, layout, None, dropout=dropout)
    sums, gradients, kept = loss_and_gradients(plain, rows_of)
    bytes_kept = {}
    for kind in KINDS:
        settings = parameters(architecture, objective, layout, kind, dropout=dropout)
        ours, our_gradients, bytes_kept[kind] = loss_and_gradients(settings, rows_of)
        assert ours.keys() == sums.keys() and our_gradients.keys() == gradients.keys()
        for name, value in (sums | gradients).items():
            assert torch.equal((ours | our_gradients)[name], value), (kind, name)
    assert bytes_kept["full"] < bytes_kept["selective"] < kept


@pytest.mark.slow
@pytest.mark.parametrize("precision", at_night(["bf16", "fp16"], always=["bf16"]))
@pytest.mark.parametrize(("architecture", "objective"), [("deberta", "masked_lm"), ("bert", "masked_lm"),
                                                         ("electra", "replaced_token")])  # fmt: skip
def test_nothing_changes_in_low_precision_either(
    architecture: str, objective: str, precision: str, rows_of: TokenStore
) -> None:
    plain = parameters(architecture, objective, "packed", None, dropout=0.1, precision=precision)
    sums, gradients, _ = loss_and_gradients(plain, rows_of)
    for kind in KINDS:
        settings = parameters(architecture, objective, "packed", kind, dropout=0.1, precision=precision)
        ours, our_gradients, _ = loss_and_gradients(settings, rows_of)
        assert {name: value for name, value in ours.items() if not torch.equal(value, sums[name])} == {}
        for name, value in gradients.items():
            if "rel_embeddings" in name:  # each block casts what all blocks use: their sum is rounded less
                assert (our_gradients[name] - value).norm() < 0.02 * value.norm()
            else:
                assert torch.equal(our_gradients[name], value), (kind, name)


def test_blocks_may_share_weights_in_low_precision() -> None:
    config = transformers.AlbertConfig(
        vocab_size=50, embedding_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    ids = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    found = []
    for kind in (None, *KINDS):
        torch.manual_seed(0)
        model = transformers.AlbertModel(config).train()
        if kind:
            checkpoint_block(model.encoder.albert_layer_groups[0].albert_layers[0], kind)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16):
            states = model(ids).last_hidden_state
        states.float().square().sum().backward()
        weight = model.encoder.albert_layer_groups[0].albert_layers[0].ffn.weight
        assert weight.grad is not None
        found.append((states.detach(), weight.grad))
    for states, gradient in found[1:]:
        assert torch.equal(states, found[0][0])
        assert (gradient - found[0][1]).norm() < 0.02 * found[0][1].norm()


def test_expensive_operations_are_those_of_the_module_docstring() -> None:
    aten = torch.ops.aten
    states, scores = torch.empty(2, 64, 8), torch.empty(2, 64, 64)
    assert is_expensive(aten.mm.default, (torch.empty(4, 8), torch.empty(8, 32)), {})
    assert is_expensive(aten.addmm.default, (torch.empty(32), torch.empty(4, 8), torch.empty(8, 32)), {})
    assert not is_expensive(aten.bmm.default, (states, states.mT), {}), "scores are larger than their inputs"
    assert is_expensive(aten.bmm.default, (scores, states), {})
    assert not is_expensive(aten.gelu.default, (states,), {})
    flash = aten._scaled_dot_product_flash_attention.default
    assert is_expensive(flash, (states, states, states), {})
    assert not is_expensive(flash, (states, states, states, 0.1), {}), (
        "it draws random numbers: if kept, it would draw none in the recomputation"
    )
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert is_expensive(efficient, (states, states, states, None, True, 0.0), {})
    assert not is_expensive(efficient, (states, states, states, None, True), {"dropout_p": 0.1})


class ChangesInPlace(torch.nn.Module):
    """Changes the result of its first product in place, with dropout before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = self.first(torch.nn.functional.dropout(states, 0.3))
        states *= 3.0
        return self.second(torch.nn.functional.dropout(states, 0.3)).sin()


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_a_block_changes_in_place_are_recomputed(kind: str) -> None:
    torch.manual_seed(0)
    plain = ChangesInPlace()
    wrapped = copy.deepcopy(plain)
    checkpoint_block(wrapped, kind)  # type: ignore[arg-type]
    given = torch.randn(5, 8)
    for step in range(3):
        found = []
        for block in (plain, wrapped):
            block.zero_grad()
            torch.manual_seed(step)
            made = block(given.requires_grad_())
            after = torch.rand(3)
            made.square().sum().backward()
            found.append([made.detach(), after, *(each.grad for each in block.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), step
    if kind == "selective":
        assert wrapped.forward.changed == {0}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_block_runs_its_own_forward(kind: str) -> None:
    block = torch.nn.Linear(4, 4)
    checkpoint_block(block, kind)  # type: ignore[arg-type]
    copied = copy.deepcopy(block)
    with torch.no_grad():
        copied.weight.zero_()
    assert torch.equal(copied(torch.ones(2, 4)), copied.bias.expand(2, 4))
    assert list(block.state_dict()) == ["weight", "bias"]


@pytest.mark.nightly
def test_two_processes_train_bit_identically_and_it_may_change_on_resume(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(
        store, batch_size={"0": 9, "1": 7}, max_steps=4, checkpoint={"save_steps": 2}, schedule={"type": "constant"}
    )
    nodes = (1, 1)
    toy.train(settings, tmp_path / "plain", nodes=nodes)
    toy.train({**settings, "max_steps": 2, "activation_checkpointing": "full"}, tmp_path / "less", nodes=nodes)
    said = toy.train({**settings, "activation_checkpointing": "selective"}, tmp_path / "less", nodes=nodes)
    assert 'parameter activation_checkpointing: was "full", is "selective"' in said
    assert toy.losses(tmp_path / "less") == toy.losses(tmp_path / "plain")
    plain, less = (tmp_path / run / "checkpoints/step-00000004" for run in ("plain", "less"))
    pairs = [(toy.saved(plain, kind), toy.saved(less, kind)) for kind in ("model", "optimizer")]
    for one, other in [*pairs, tuple(load_file(each / "model/model.safetensors") for each in (plain, less))]:
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
