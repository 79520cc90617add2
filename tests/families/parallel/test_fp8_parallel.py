"""fp8 in layers that processes divide: the scales are those of one process, where torchao emulates 8-bit products."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import worlds
from engine_runs import UNVALIDATED, assert_close, assert_same_bits, assert_same_losses, settings, state
from lonely_group import LonelyGroup
from transformers import AutoModelForCausalLM

from terakoya.components import TensorPartition
from terakoya.errors import UserError
from terakoya_parallel.tensor_layers import TensorDivision, partition_blocks
from terakoya_precision import fp8

CLOSE = 1e-3
"""Tolerance of a weight's gradient, relative to its norm: room for one number that the rounding of a sum over processes
moves to its neighbour in 8 bits. The largest observed error is 6e-6; scales of parts make some 5e-2."""
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "initializer_range": 0.02}
NEXT = {"type": "masked_lm", "layout": "pairs", "next_sentence": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "positions": ("llama", {"parallel": {"tp_size": 2, "sequence_parallel": True}}),
    "stages": ("llama", {"parallel": {"pp_size": 2}}),
    # its vocabulary head is divided and in 8 bits, because the next-sentence head is the last layer
    "bert": ("bert", {"objective": NEXT}),
}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"parallel": {"tp_size": 2}, "activation_checkpointing": "full"},
    "compiled_stages": {"parallel": {"pp_size": 2}},
}


def job(base: Path, run: str, name: str, store: Path, changes: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A job of `fp8_worker` with the architecture `name`."""
    raw = settings(store, store, name, precision="fp8", compile="auto", **UNVALIDATED)
    architecture = {**raw["architecture"], **SHAPE, **({"num_key_value_heads": 4} if name == "llama" else {})}
    return {"out": str(base / run), "settings": {**raw, "architecture": architecture, **changes}, **others}


def gradients(out: Path) -> dict[str, torch.Tensor]:
    """Of the first step, times a constant: AdamW's first moments."""
    return {name: value for name, value in state(out, "optimizer", 1).items() if name.endswith("/exp_avg")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    pytest.importorskip("torchao.float8", reason='needs `pip install "terakoya[fp8]"`')
    import fp8_worker

    base = tmp_path_factory.mktemp("fp8")
    store = toy.make_store(base / "words", documents=60, seed=1, unit="line", vocabulary=192)
    pair = {"parallel": {"tp_size": 2}}
    one, two = [], []
    for run, (name, changes) in CASES.items():
        alone = {**changes, "parallel": {}}
        one.append(job(base, f"{run}.one", name, store, alone, float32=True))
        two.append(job(base, run, name, store, {**pair, **changes}, float32=True))
    two.append(job(base, "separate", "llama", store, pair, float32=True, separate=True))
    for run, changes in COMPILED.items():
        two.append(job(base, run, "llama", store, {**changes, "compile": "blocks"}, float32=True, compiled=True))
    two.append(job(base, "bf16", "llama", store, pair))
    middle = str(base / "bf16/checkpoints/step-00000001")
    two.append(job(base, "resumed", "llama", store, pair, start_from=middle))
    for jobs in (one, two):
        nodes = (1,) if jobs is one else (2,)
        toy.finish(worlds.start(partial(fp8_worker.work, jobs), nodes, base / "said"))
    return base


@pytest.mark.slow
@pytest.mark.parametrize("run", CASES)
def test_scales_are_those_of_one_process(runs: Path, run: str) -> None:
    """In float32: the rounding of sums in bf16 moves many numbers to their neighbours in 8 bits."""
    assert_close(gradients(runs / f"{run}.one"), gradients(runs / run), CLOSE)
    assert_same_losses(runs / f"{run}.one", runs / run, 1e-4)


@pytest.mark.slow
def test_scales_of_parts_would_give_other_gradients(runs: Path) -> None:
    with pytest.raises(AssertionError, match=r"e-0[12]"):
        assert_close(gradients(runs / "llama.one"), gradients(runs / "separate"), CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("run", COMPILED)
def test_compiled_blocks_have_no_break(runs: Path, run: str) -> None:
    """Largest values are exchanged within the graphs."""
    found = json.loads((runs / run / "graphs.json").read_text())
    assert found["graphs"] > 0 and not found["breaks"], found
    assert_close(gradients(runs / "llama.one"), gradients(runs / run), CLOSE)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_and_exports_plain_layers(runs: Path) -> None:
    assert_same_bits(runs / "bf16", runs / "resumed")
    exported = AutoModelForCausalLM.from_pretrained(runs / "bf16/checkpoints/step-00000002/model")
    plain = {each for each in exported.modules() if isinstance(each, torch.nn.Linear)}
    assert len(plain) == 15 and all(type(each) is torch.nn.Linear for each in plain)
    weights = state(runs / "bf16", "model")
    for name, value in exported.named_parameters():
        assert torch.equal(value, weights[f"model.{name}"]), name


@pytest.fixture
def emulated() -> Iterator[None]:
    pytest.importorskip("torchao.float8", reason='needs `pip install "terakoya[fp8]"`')
    import fp8_worker

    with fp8_worker.emulated():
        yield


def test_a_part_that_is_too_narrow_is_refused(emulated: None) -> None:
    """Which layers are in 8 bits does not depend on the number of processes."""
    from torchao.float8 import convert_to_float8_training

    partition = TensorPartition(sizes={}, inputs=("0",), column_parallel={"0": 1}, row_parallel=("1",))

    def divide(size: int) -> torch.nn.Module:
        block = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
        convert_to_float8_training(block, config=fp8._recipe().config)
        partition_blocks([block], partition, LonelyGroup(0, size), TensorDivision(), dropout=None)
        return block

    assert divide(2)(torch.ones(2, 64)).shape == (2, 64)
    with pytest.raises(UserError) as caught:
        divide(4)
    assert str(caught.value) == (
        'precision: "fp8" needs widths divisible by 16 in each process, but of a layer with 64 inputs and 96 outputs '
        'parallel.tp_size 4 leaves 64 and 24; use a smaller one, or "bf16"'
    )
