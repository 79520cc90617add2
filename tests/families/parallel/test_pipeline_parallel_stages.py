"""A model that is cut into stages is the same model: weights, results and dropout of each stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from terakoya.components import Batch
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import to_device
from terakoya.training.model.build import build_module_for_training
from terakoya.training.model.module_parts import top_level_models
from terakoya_contract.toy import SEQUENCE_LENGTH, VOCABULARY, make_rows, make_store, values
from terakoya_parallel.pipeline import schedulable_count
from terakoya_parallel.pipeline_stage import MicroBatch, Stage

FAMILIES = ("gpt2", "gptj", "llama", "qwen3")
CPU = torch.device("cpu")
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout")


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("stages") / "toy", conversations=True)


def written(name: str, *, dropout: float = 0.0, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a run of 5 blocks."""
    component = registry().component("architectures", name)
    dropouts = {each: dropout for each in DROPOUTS if each in component.model_fields}
    return {
        "data": {"train": ["store"], "sequence_length": SEQUENCE_LENGTH},
        "architecture": {"type": name, **values(component), **dropouts, "num_hidden_layers": 5},
        "objective": {"type": "causal_lm"}, "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
        "batch_size": {"-1": 6}, "max_steps": 1, "precision": "fp32", **changes,
    }  # fmt: skip


def read(name: str, **changes: Any) -> Parameters:
    return Parameters.from_dict(written(name, **changes), source="test")


def built(parameters: Parameters) -> nn.Module:
    """The module of `parameters`, with random norms and biases too: their initial values would hide missing parts."""
    module = build_module_for_training(parameters, VOCABULARY)
    attention.use(module, "sdpa")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module.train()


def stages_of(module: nn.Module, parameters: Parameters, count: int) -> list[Stage]:
    return [
        Stage(
            module, [parameters.architecture], VOCABULARY,
            index=index, count=count, device=CPU, precision=parameters.precision,
        )
        for index in range(count)
    ]  # fmt: skip


def run_number(stage: Stage, number: int, *received: torch.Tensor) -> torch.Tensor:
    """What the stage makes of a micro-batch of its step."""
    stage.number = number
    made: torch.Tensor = stage(*received)
    return made


def tensors_of(parameters: Parameters, store: TokenStore, *, count: int = 4) -> dict[str, torch.Tensor]:
    rows = make_rows(store, parameters.objective.row_layout(), count=count)
    batch: Batch = parameters.objective.collate(rows, VOCABULARY)
    return to_device(batch, CPU, flash=False)


OBJECTIVES = [("causal_lm", "packed"), ("causal_lm", "stream"), ("instruction", "padded")]


@pytest.mark.parametrize(("objective", "layout"), OBJECTIVES)
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_in_sequence_compute_the_whole_model(
    name: str, objective: str, layout: str, rows_of: TokenStore
) -> None:
    parameters = read(name, objective={"type": objective, "layout": layout})
    module, tensors = built(parameters), tensors_of(parameters, rows_of)
    expected = module(tensors)["lm_loss"]
    gradients = torch.autograd.grad(expected, list(module.parameters()))
    for count in (2, 5):
        micro_batch = MicroBatch(tensors, lambda sums: sums["lm_loss"], 0)
        received: tuple[torch.Tensor, ...] = ()
        for stage in stages_of(module, parameters, count):
            stage.step, stage.rows = [micro_batch], len(tensors["input_ids"])
            made = stage(*received)
            assert made.shape == (() if stage.last else (*tensors["input_ids"].shape, 16))
            received = (made,)
        assert micro_batch.sums["lm_loss"].item() == made.item() == pytest.approx(expected.item(), rel=1e-6)
        for one, other in zip(gradients, torch.autograd.grad(made, list(module.parameters())), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_keeps_only_its_own_weights(name: str) -> None:
    """Every weight is in exactly one stage, except a matrix that is both embedding and head."""
    parameters = read(name)
    module = built(parameters)
    names = {id(value): each for each, value in module.named_parameters()}
    held = [{names[id(value)] for value in stage.parameters()} for stage in stages_of(module, parameters, 3)]
    assert set().union(*held) == set(names.values())
    twice = [each for each in names.values() if sum(each in stage for stage in held) > 1]
    tied = parameters.architecture.tie_word_embeddings
    assert len(twice) == tied and all(each in held[0] & held[2] for each in twice)
    blocks = [{each.split(".")[3] for each in stage if each.split(".")[2] in ("h", "layers")} for stage in held]
    assert blocks == [{"0", "1"}, {"2", "3"}, {"4"}]


def test_dropout_depends_on_micro_batch_and_stage_not_on_the_order(rows_of: TokenStore) -> None:
    parameters = read("gpt2", dropout=0.5)
    module, tensors = built(parameters), tensors_of(parameters, rows_of)
    between = stages_of(module, parameters, 5)[1:3]
    given = torch.randn(*tensors["input_ids"].shape, 16)

    def run(stage: Stage, order: tuple[int, ...]) -> dict[int, torch.Tensor]:
        stage.step = [MicroBatch(tensors, lambda sums: sums["lm_loss"], seed) for seed in (7, 8)]
        stage.rows = len(given)
        return {micro: run_number(stage, micro, given).detach() for micro in order}

    first, again = run(between[0], (0, 1)), run(between[0], (1, 0))
    assert all(torch.equal(first[micro], again[micro]) for micro in (0, 1))
    assert not torch.equal(first[0], first[1]), "each micro-batch has its own dropout"
    between[0].load_state_dict(between[1].state_dict())
    assert not torch.equal(run(between[0], (0,))[0], run(between[1], (0,))[0]), "and so has each stage"


def test_a_stage_without_anything_to_train_is_refused() -> None:
    """As with adapters in some blocks only; every process says so, also those whose stages are trained."""
    parameters = read("gpt2")
    module = build_module_for_training(parameters, VOCABULARY)
    (model,) = top_level_models(module)
    for block in parameters.architecture.blocks(model)[3:]:
        block.requires_grad_(False)
    with pytest.raises(
        UserError, match="stage 2 of 2 has nothing to train in its blocks, 3 to 4 of GPT2LMHeadModel; n"
    ):
        stages_of(module, parameters, 2)


def test_smaller_micro_batches_are_padded_with_rows_of_zeros(rows_of: TokenStore) -> None:
    parameters = read("llama")
    first, second = stages_of(built(parameters), parameters, 2)
    tensors = tensors_of(parameters, rows_of, count=3)
    for stage in (first, second):
        stage.step = [MicroBatch(tensors, lambda sums: sums["lm_loss"], 1), None]
        stage.rows, stage.length = 5, SEQUENCE_LENGTH
    made = run_number(first, 0)
    assert made.shape == (5, SEQUENCE_LENGTH, 16) and not made[3:].any() and made[:3].any()
    made[3:].detach().fill_(float("nan"))
    assert run_number(second, 0, made).isfinite(), "the padding is not used"
    nothing = run_number(first, 1)
    assert nothing.shape == made.shape and not nothing.any()
    loss = run_number(second, 1, nothing)
    loss.backward()
    assert loss.item() == 0.0 and all(each.grad is None for each in second.parameters())


def test_the_number_of_micro_batches_fits_the_schedule() -> None:
    """1F1B takes no fewer than stages; interleaved, rounds of the same size (see torch's ScheduleInterleaved1F1B)."""
    assert [schedulable_count(count, processes=3, in_rounds=False) for count in (1, 3, 4)] == [3, 3, 4]
    for processes in range(2, 9):
        for count in range(1, 50):
            found = schedulable_count(count, processes=processes, in_rounds=True)
            fit = [each for each in range(count, 2 * count + 9) if each % max(1, each // processes) == 0]
            assert found == fit[0] and found - count < processes
