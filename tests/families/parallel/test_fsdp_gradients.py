"""`fully_shard`: gradients of all shards together are those of plain autograd for the whole global batch.

Rows are uneven, 5 and 2 or 4, 2 and 1, in micro-steps of 2, so that the processes with fewer run empty ones. A weight
of 16 rows gives 6, 6 and 4 rows to three processes; a weight of 2 rows gives the last process none.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import adagrad
import engine_work
import pytest
import torch
import toy
import worlds
from dropouts import DROPOUTS
from engine_runs import Runs
from safetensors.torch import load_file
from selection import at_night
from start_folders import trainer
from torch import nn

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.batches import to_device
from terakoya.training.model.build import build_module
from terakoya_contract.toy import VOCABULARY, make_store, values
from terakoya_parallel.fsdp_groups import shard_module, shardable_blocks

TABLES = {2: {"0": 5, "1": 2}, 3: {"0": 4, "1": 2, "2": 1}}
TIED = {"type": "replaced_token", "generator_size": "1/2", "sharing": "tied"}
SUBJECTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "bert": ("bert", {"type": "masked_lm"}, (2, 3)),
    "electra": ("electra", TIED, (2, 3)),
    "disentangled": ("electra", {**TIED, "sharing": "disentangled"}, (2, 3)),
    "gpt2": ("gpt2", {"type": "causal_lm", "append_eos": False}, (2, 3)),
    "llama": ("llama", {"type": "causal_lm", "append_eos": False, "head_positions": 20}, (2, 3)),
    "gptj": ("gptj", {"type": "causal_lm", "append_eos": False}, (2,)),
    "qwen3": ("qwen3", {"type": "causal_lm", "append_eos": False}, (2,)),
    "roberta": ("roberta", {"type": "masked_lm"}, (2,)),
    "deberta": ("deberta", {"type": "masked_lm"}, (2,)),
    "deberta_v2": ("deberta_v2", {"type": "masked_lm"}, (2,)),
    "modernbert": ("modernbert", {"type": "masked_lm"}, (2,)),
    "t5": ("t5", {"type": "span_corruption"}, (2,)),
}
"""By name: architecture, objective, numbers of processes."""
STREAM = {"precision": "bf16"}
HALF = {
    "llama": {**STREAM, "autocast": True}, "gpt2": {"precision": "fp16", "loss_scaling": {"init_scale": 1024.0}},
    **{f"{name}, stream": STREAM for name in SUBJECTS},
}  # fmt: skip
"""What is compared with DDP to the bit, and how it computes."""
ADAGRAD = {"type": "adagrad", "learning_rate": 0.1}
OTHERWISE = {"t5, stream", "deberta_v2, stream"}
"""In T5 each block adds up its gradients of the encoder's states first; DeBERTa V2 reads a table that is rounded."""
CASES = at_night(
    [(name, processes) for name, (_, _, worlds) in SUBJECTS.items() for processes in worlds],
    always=[("electra", 3), ("llama", 3)],
)


def settings(store: Path, name: str, rows: dict[str, int], **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a subject at toy size, without dropout."""
    architecture, objective, _ = SUBJECTS[name]
    component = registry().component("architectures", architecture)
    dropouts = {key: 0.0 for key in DROPOUTS if key in component.model_fields}
    return {
        **toy.parameters(store, batch_size=rows, micro_batch_size=2, max_steps=1),
        "architecture": {"type": architecture, **values(component), **dropouts}, "objective": objective,
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store."""
    return make_store(tmp_path_factory.mktemp("rows")).folder


def taken(runs: Runs, rows: Path, name: str, processes: int = 2, engine: str = "fsdp", **changes: Any) -> Path:
    """The folder of what several processes found in the first step of a subject."""
    raw = settings(rows, name, TABLES[processes], parallel={"engine": engine}, **changes)
    return runs.train(raw, (1,) * processes, work=engine_work.gradients)


def plain(store: Path, name: str, out: Path) -> tuple[dict[str, nn.Parameter], float]:
    """Returns the weights with their gradients, and the loss, of seven rows as one batch, from plain autograd: sums
    over counts, weighted."""
    made = trainer(settings(store, name, {"-1": 7}, micro_batch_size=7), out)
    module: Any = made.engine.module
    if hasattr(module, "sample"):
        module.sample = engine_work.fixed_sample
    (batch,) = made.batches(0).real
    sums = module(to_device(batch, torch.device("cpu"), flash=False))
    terms = made.run.objective.terms().items()
    loss = sum(term.weight * sums[key] / batch.counts[term.count] for key, term in terms if term.weight is not None)
    loss.backward()
    return dict(module.named_parameters()), loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), CASES)
def test_gradients_are_those_of_one_batch(runs: Runs, rows: Path, name: str, processes: int, tmp_path: Path) -> None:
    weights, loss = plain(rows, name, tmp_path / "plain")
    expected = {key: value.grad for key, value in weights.items() if value.grad is not None}
    found = taken(runs, rows, name, processes)
    got = load_file(found / "gradients.safetensors")
    assert got.keys() == expected.keys()
    norm = torch.stack([value.double().norm() for value in expected.values()]).norm()
    error = torch.stack([(got[key].double() - value.double()).norm() for key, value in expected.items()]).norm()
    assert error / norm <= 1e-6
    for key, value in expected.items():
        floor = 1e-3 * norm  # for gradients that are only rounding, such as those of key biases
        assert (got[key].double() - value.double()).norm() <= 1e-6 * max(value.double().norm(), floor), key
    held = json.loads((found / "held.json").read_text())
    assert held["loss"] == pytest.approx(loss, rel=1e-6)
    assert held["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    # each process holds its rows of weights and gradients
    whole = sum(value.numel() for value in got.values())
    numbers, reduced = zip(*held["held"], strict=True)
    assert sum(numbers) == whole and max(numbers) < 1.2 * whole / processes
    assert all(len(each) > 1 and set(each) == {number} for number, each in zip(numbers, reduced, strict=True))
    assert held["groups"] == {"electra": 5, "disentangled": 5, "t5": 5}.get(name, 3), "each block, and the rest"


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(HALF, always=("llama", "bert, stream", "deberta, stream")))
def test_in_16_bits_gradients_have_the_bits_of_ddp(runs: Runs, rows: Path, name: str) -> None:
    """Weights are cast before they are gathered, as autocast casts them after, and copies are made; gradients are
    summed in float32. Rows are in one micro-step: of two processes there is one way to add up."""
    half, subject = {**HALF[name], "micro_batch_size": 7}, name.split(",")[0]
    found = [taken(runs, rows, subject, engine=engine, **half) for engine in ("ddp", "fsdp")]
    ddp, fsdp = (load_file(out / "gradients.safetensors") for out in found)
    assert ddp.keys() == fsdp.keys() and len(ddp) > 10
    for key, value in ddp.items():
        assert value.dtype == fsdp[key].dtype == torch.float32
        if name in OTHERWISE:
            assert (value - fsdp[key]).norm() <= 0.01 * max(value.norm(), 1e-3), key
        else:
            assert torch.equal(value, fsdp[key]), key


@pytest.mark.nightly
@pytest.mark.parametrize("processes", TABLES)
def test_an_optimizer_may_have_state_before_its_first_step(rows: Path, processes: int, tmp_path: Path) -> None:
    changes = {"optimizer": ADAGRAD, "schedule": {"type": "constant"}, "max_grad_norm": 0.0}
    raw = settings(rows, "bert", TABLES[processes], parallel={"engine": "fsdp"}, **changes)
    work = partial(worlds.train, [{"out": str(tmp_path / "run"), "settings": raw}])
    toy.finish(worlds.start(work, (1,) * processes, tmp_path / "said", plugins=[Path(adagrad.__file__)]))
    weights, _ = plain(rows, "bert", tmp_path / "plain")
    trained = toy.saved(tmp_path / "run/checkpoints/step-00000001")
    for name, before in weights.items():
        assert before.grad is not None
        expected = before - 0.1 * before.grad / ((adagrad.BEGIN + before.grad.square()).sqrt() + adagrad.EPS)
        assert torch.allclose(trained[name], expected, rtol=0.0, atol=1e-7), name


def test_a_block_that_shares_a_weight_is_not_a_group() -> None:
    parameters = Parameters.from_dict(settings(Path("store"), "bert", {"-1": 7}), source="test")
    module: Any = build_module(parameters, VOCABULARY)
    layers = list(module.model.bert.encoder.layer)
    assert shardable_blocks(module, [parameters.architecture], VOCABULARY) == layers
    module.model.cls.predictions.transform.dense.weight = layers[1].attention.output.dense.weight
    assert shardable_blocks(module, [parameters.architecture], VOCABULARY) == layers[:1]


def test_a_scalar_weight_is_refused_by_name() -> None:
    parameters = Parameters.from_dict(settings(Path("store"), "bert", {"-1": 7}), source="test")
    module: Any = build_module(parameters, VOCABULARY)
    module.model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match=r'parallel.engine "fsdp": model.scale is a scalar'):
        shard_module(module, [parameters.architecture], VOCABULARY, mesh=None, precision="fp32")  # type: ignore[arg-type]
