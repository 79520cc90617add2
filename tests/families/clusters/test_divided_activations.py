"""What processes keep that divide layers or positions: `estimate --gpus` against autograd."""

from __future__ import annotations

import pytest
from kept_by_block import HIDDEN, POSITIONS, kept_by_block, settings
from torch import nn

from terakoya.checking.fake_tensors import with_depth
from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.config.parameters import Parameters
from terakoya_clusters.layouts.cluster import Layout, Program
from terakoya_clusters.layouts.measured_model import LonelyGroup, measure_transformer
from terakoya_clusters.layouts.rank_memory import activations, rank_memory
from terakoya_clusters.layouts.transformer import Transformer
from terakoya_parallel.tensor_layers import TensorDivision, TensorParallelGroup, partition_blocks
from terakoya_planning import fake_step

VOCABULARY = synthetic_vocabulary(300, POSITIONS)
TABLES = 2 * 6 / HIDDEN
"""Sines and cosines of Llama's heads of 6 numbers, which all blocks share."""


def run(name: str) -> Parameters:
    raw = {
        "data": {"train": ["store"], "sequence_length": POSITIONS},
        "architecture": {"type": name, "num_hidden_layers": 4, **settings(name)},
        "objective": {"type": "causal_lm"},
        "optimizer": {"type": "adamw", "learning_rate": 0.1},
        "schedule": {"type": "constant"},
        "batch_size": {"-1": 8},
        "micro_batch_size": 2,
        "max_steps": 2,
        "precision": "fp32",
    }
    return Parameters.from_dict(raw, source="test")


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.nightly)])
def measured(request: pytest.FixtureRequest) -> tuple[str, Transformer]:
    name = request.param
    return name, measure_transformer(run(name), VOCABULARY, context=float(POSITIONS))[0]


def test_tensor_parallel_processes_keep_what_autograd_keeps(measured: tuple[str, Transformer]) -> None:
    name, model = measured
    tables = TABLES if name == "llama" else 0.0
    for processes in (1, 2, 4) if name == "gpt2" else (1, 2):
        for share in (False, True) if processes > 1 else (False,):
            group = LonelyGroup(0, processes, sequence_parallel=share) if processes > 1 else None
            found = activations(model, Layout(tensor=processes, norms_shared=share)) / 4 / HIDDEN
            assert found == pytest.approx(kept_by_block(name, group) - tables, abs=0.01), (processes, share)


def test_gathered_keys_and_values_are_kept_whole(measured: tuple[str, Transformer]) -> None:
    name, model = measured
    # GPT-2's own keys and values are in one tensor with the queries; Llama's are not kept, and are counted all the same
    tables, own = (TABLES, 2 * 2 / 4) if name == "llama" else (0.0, 0.0)
    program = Program(computed=4)
    for processes in (2, 4):
        layout = Layout(sequence=processes, keys_gathered=True)
        tokens = POSITIONS / processes * model.layers
        found = rank_memory(model, layout, program)["activations"] / tokens / 4 / HIDDEN
        assert found == pytest.approx(kept_by_block(name, None, sharing_keys=processes) - tables + own, abs=0.01)
        # recomputed blocks gather again, so one layer's are there at a time
        full = rank_memory(model, layout.replace(recomputation="full"), program)["activations"]
        assert full < (model.layers + 20 + 2 * processes) * 4 * HIDDEN * POSITIONS / processes


@pytest.mark.nightly
@pytest.mark.parametrize("share", [False, True])
def test_recomputed_blocks_of_tensor_parallel_processes_keep_inputs_and_sums(
    measured: tuple[str, Transformer], share: bool
) -> None:
    """Against steps that are simulated with their weights; "selective" keeps sums whole, before they are added up."""
    name, model = measured
    parameters = run(name).model_copy(update={"activation_checkpointing": "selective"})
    group = LonelyGroup(0, 2, sequence_parallel=share)
    assert kept_by_layer(parameters, group) == pytest.approx(
        activations(model, Layout(tensor=2, norms_shared=share, recomputation="selective")), rel=0.01
    )
    assert activations(model, Layout(tensor=2, norms_shared=share, recomputation="full")) == 4 * HIDDEN / (1 + share)


def kept_by_layer(parameters: Parameters, group: TensorParallelGroup) -> float:
    """Bytes of a token that one more layer keeps in a simulated step of one of the processes of `group`."""
    architecture = parameters.architecture
    partition = architecture.tensor_partition()
    assert partition is not None

    def divide(module: nn.Module) -> None:
        (model,) = parameters.objective.exports(module).values()
        partition_blocks(architecture.blocks(model), partition, group, TensorDivision(), dropout=None)

    def step(layers: int, rows: int) -> int:
        smaller = with_depth(parameters, layers)
        assert smaller is not None
        found = fake_step.simulate_step(smaller, VOCABULARY, rows=rows, gradients_stay=False, gpu=True, divide=divide)
        return found.windows[fake_step.BACKWARD]["activations"]

    return (step(2, 2) - step(2, 1) - step(1, 2) + step(1, 1)) / POSITIONS
