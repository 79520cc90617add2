"""Models on tensors without data: copies of modules, adapters, and what flash attention takes."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from torch import nn

from terakoya.checking.fake_tensors import KnownValues, fake_tensors
from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.config.parameters import Parameters
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya_planning.fake_step import BACKWARD, FORWARD, LATE_BACKWARD, model_sizes, simulate_step
from terakoya_planning.memory_tracker import SCRATCH
from terakoya_planning.row_statistics import row_statistics

PRESETS = Path(__file__).resolve().parents[3] / "parameters"
VOCABULARY = synthetic_vocabulary(100, 32)


def test_a_copy_of_a_module_shares_the_mode_of_its_tensors() -> None:
    """torch copies the mode with each tensor, and with it pointers that two owners free: Python crashes later."""
    with fake_tensors(KnownValues) as values:
        module = nn.BatchNorm1d(4)
        module.other = module.weight
        frozen = nn.Linear(2, 2).requires_grad_(False)
        copied = copy.deepcopy(module)
        assert copied.weight is not module.weight and copied.other is copied.weight, "tied as before"
        for each in (copied.weight, copied.running_mean):
            assert each.fake_mode is values.fake
        assert isinstance(copied.weight, nn.Parameter) and not isinstance(copied.running_mean, nn.Parameter)
        assert [each.requires_grad for each in copied.parameters()] == [True, True]
        assert not any(each.requires_grad for each in copy.deepcopy(frozen).parameters())
    kept = nn.Linear(2, 2)
    assert torch.equal(copy.deepcopy(kept).weight, kept.weight), "and nothing of it stays"


def test_models_that_share_embeddings_are_measured_beside_others() -> None:
    """A DeBERTa V3 exports a copy of its discriminator."""
    for name in ("deberta_v3_base", "electra_base", "deberta_v3_base"):
        parameters = Parameters.load(PRESETS / f"{name}.json", ["architecture.num_hidden_layers=1"])
        sizes = model_sizes(parameters, VOCABULARY, context=32.0)
        assert sizes.model_bytes > 0 and sizes.trained == sizes.parameters > 7e6


def test_hidden_states_are_measured_in_the_precision_of_the_runs_engine() -> None:
    """The simulation itself has one process, which shards nothing."""

    def kept(*changes: str) -> int:
        given = ["precision=bf16", "architecture.num_hidden_layers=1", *changes]
        parameters = Parameters.load(PRESETS / "tiny_bert.json", given)
        windows = simulate_step(parameters, VOCABULARY, rows=2, gradients_stay=False, gpu=True).windows
        return windows[FORWARD]["activations"]

    assert kept() < 0.8 * kept("autocast=true")
    assert kept("autocast=true") == kept('parallel={"tp_size": 2}')
    assert kept() == kept('parallel={"engine": "fsdp"}')


def test_adapters_are_measured() -> None:
    sizes = model_sizes(Parameters.load(PRESETS / "tiny_lora.json"), VOCABULARY, context=32.0)
    width, inner, rank, layers = 256, 688, 8, 4
    assert sizes.trained == layers * rank * (4 * 2 * width + 3 * (width + inner))
    assert sizes.saved_bytes < sizes.model_bytes


@pytest.mark.parametrize(
    ("changes", "documents", "room"),
    [([], 40.0, 256), (["architecture.num_key_value_heads=4"], 30.0, 128), (["attention=sdpa"], 40.0, 0)],
)
def test_what_flash_allocates_in_its_backward_is_counted_where_it_runs(
    changes: list[str], documents: float, room: int
) -> None:
    small = ["precision=bf16", "architecture.num_hidden_layers=2", *changes]
    parameters = Parameters.load(PRESETS / "tiny_llama.json", small)
    positions, heads, size = 4 * 256, 4, 64
    expected = 4 * (positions + 128 * room) * heads * (size + 1) if room else 0
    if not changes:  # two heads share one of keys and values
        expected += 2 * positions * heads * size * 2
    for gpu in (True, False):
        found = simulate_step(
            parameters, VOCABULARY, rows=4, gradients_stay=False, gpu=gpu, documents_per_row=documents
        ).windows
        seen = [found[window].get(SCRATCH, 0) for window in (BACKWARD, LATE_BACKWARD)]
        assert seen == ([expected, expected] if gpu else [0, 0])


def test_the_documents_of_a_row_are_counted_in_the_store(store: Path) -> None:
    opened, length = TokenStore.open(store), 64
    for layout, padding in ({}, 1.0), ({"layout": "stream"}, 0.0):
        settings = {"type": "masked_lm", **layout}
        parameters = Parameters.from_dict(toy.parameters(store, objective=settings), source="toy")
        kind = parameters.objective.row_layout()
        source = RowSource(opened, kind, sequence_length=length, seed=1)
        rows = source.load(0, np.arange(len(source)))
        real = sum(len(set(row[row >= 0].tolist())) for row in rows.document_ids) / len(source)
        data = parameters.data.model_copy(update={"sequence_length": length})
        found = row_statistics(data, kind, None).documents_per_row
        assert found == pytest.approx(real + padding, rel=0.1), layout
