"""Every bundled family as a GPU runs it by default: blocks compiled, in the bf16 stream, with either attention."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import compiled_runs
import pytest
import torch
from selection import at_night
from torch._dynamo.utils import counters

from terakoya.plugins import registry
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture
from terakoya.training.model import compilation

# torch's tracer looks at the gradients of activations, and silences the warning in another way than pytest
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # from PeftModel
]

EVERY_CASE = [(name, backend) for name in compiled_runs.CASES for backend in compiled_runs.backends(name)]
REPRESENTATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("flash", {}),
    "deberta_v2": ("sdpa", {}),
    "gpt2": ("sdpa", {}),
    "llama": ("flash", {"activation_checkpointing": "selective"}),
    "t5": ("sdpa", {"sizes": {"num_layers": 1, "num_decoder_layers": 1}}),
}
"""A case of each base class, and what is special about its run."""


def check(
    name: str, folder: Path, backend: str, *, compiler: str = compilation.TRACE_ONLY, **changes: Any
) -> list[int]:
    """Weights and the optimizer's state are those of the same run uncompiled, bit for bit, no graph has a break, and
    all graphs exist after three steps. Returns their number after each step, and after the last validation."""
    run = compiled_runs.parameters(name, folder, **changes)
    expected = compiled_runs.saved(run, folder / "uncompiled", backend=backend, compiler=None)
    with compiled_runs.graphs_by_step() as graphs:
        got = compiled_runs.saved(run, folder / "compiled", backend=backend, compiler=compiler)
        assert not counters["graph_break"]
    assert got.keys() == expected.keys()
    assert [each for each, value in expected.items() if not torch.equal(value, got[each])] == []
    assert len(graphs) == 7 and graphs[0] > 0
    assert len(set(graphs[2:])) == 1, graphs
    return graphs


def base_classes(names: Iterable[str]) -> set[type]:
    """The classes of `toolkit` of which the architectures of the cases `names` are."""
    kinds = (registry().component("architectures", compiled_runs.CASES[name][0]) for name in names)
    return {
        next(
            base
            for base in kind.__mro__
            if base.__module__.startswith("terakoya.toolkit") and not base.__name__.endswith("Settings")
        )
        for kind in kinds
    }


def test_every_bundled_family_is_a_case_and_every_base_class_has_a_representative() -> None:
    bundled = {
        name
        for name in registry().names("architectures")
        if issubclass(registry().component("architectures", name), TransformersArchitecture)
    }
    assert {architecture for architecture, _, _ in compiled_runs.CASES.values()} == bundled
    assert {objective for _, objective, _ in compiled_runs.CASES.values()} == set(registry().names("objectives"))
    assert base_classes(REPRESENTATIVES) == base_classes(compiled_runs.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(REPRESENTATIVES, always=("bert",)))
def test_a_compiled_run_is_that_of_uncompiled_blocks(name: str, tmp_path: Path) -> None:
    backend, changes = REPRESENTATIVES[name]
    check(name, tmp_path, backend, **{"micro_batch_size": 4, **changes})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [None, "full", "selective"])
@pytest.mark.parametrize(("name", "backend"), EVERY_CASE)
def test_every_compiled_run_is_that_of_uncompiled_blocks(
    name: str, backend: str, kind: str | None, tmp_path: Path
) -> None:
    """Recomputation goes through AOTAutograd, which draws the numbers of dropout itself: without dropout, then. The
    tracer alone would recompute with other numbers. AOTAutograd rounds T5 otherwise."""
    others: dict[str, Any] = {} if kind is None else {"without_dropout": True}
    if kind is not None and name != "t5":
        others["compiler"] = "aot_eager"
    graphs = check(name, tmp_path, backend, activation_checkpointing=kind, **others)
    # where widths are those of layouts, every graph is made in the first step
    assert len(set(graphs)) == 1 or name == "t5"
    if name == "modernbert":  # layers with and without a window; micro-batches of 3 and of 2 rows, and validation
        assert graphs[0] == 6


@pytest.mark.nightly
@pytest.mark.parametrize("name", compiled_runs.CASES)
def test_whole_modules_and_those_under_autocast_are_compiled(name: str, tmp_path: Path) -> None:
    for folder, changes in (("whole", {"compile": "whole"}), ("autocast", {"autocast": True})):
        check(name, tmp_path / folder, compiled_runs.backends(name)[0], **changes)


@pytest.mark.nightly
def test_blocks_above_frozen_ones_are_compiled(tmp_path: Path) -> None:
    check("bert", tmp_path, "flash", frozen_layers=1)


@pytest.mark.nightly
def test_blocks_with_adapters_are_compiled(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason='needs `pip install "terakoya[lora]"`')
    run = compiled_runs.parameters("llama", tmp_path, checkpoint={"save_steps": 100})
    compiled_runs.saved(run, tmp_path / "start", backend="flash", compiler=None)
    (model,) = (tmp_path / "start" / "checkpoints").glob("*/model")
    adapters = {"r": 2, "target_modules": "all-linear", "init_lora_weights": "gaussian"}
    check("llama", tmp_path, "flash", start_from=str(model), lora=adapters)
