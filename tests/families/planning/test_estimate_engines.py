"""The estimated memory of each process under every engine, against the memory of two real processes: for a run as it
is, and for suggested layouts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import memory_worker
import pytest
import toy
import worlds
from selection import at_night, wanted

from terakoya.config.parameters import Parameters
from terakoya.store.token_store import TokenStore
from terakoya_planning import fake_step
from terakoya_planning.engine_memory import Sharding, memory_per_process, offloaded_memory
from terakoya_planning.estimate import estimate, first_rank_batch

PRESETS = Path(__file__).parents[3] / "parameters"
STAGES: dict[str, dict[str, Any]] = {
    **{str(stage): {"zero_stage": stage} for stage in range(4)},
    **{f"{stage}, optimizer": {"zero_stage": stage, "offload_optimizer_device": "cpu"} for stage in (1, 2, 3)},
    "3, both": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
}
"""DeepSpeed's stages, and what is offloaded."""
SIZES: dict[str, dict[str, Any]] = {
    "toy": {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "max_position_embeddings": 64},
    "tiny_gpt2": {},
    "short rows": {"num_hidden_layers": 2},
}
MICRO_BATCHES = {"toy": 8, "tiny_gpt2": 4, "short rows": 8}
"""Rows of 8 on each process: in one micro-step, in two, in one whose activations are smaller than gradients."""
LENGTHS = {"toy": 64, "tiny_gpt2": 64, "short rows": 8}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "ddp": ({"engine": "ddp"}, {"data": 2}),
    "fsdp": ({"engine": "fsdp"}, {"data": 2, "zero_stage": 3}),
    "tp": ({"engine": "ddp", "tp_size": 2}, {"tensor": 2}),
    "pp": ({"engine": "ddp", "pp_size": 2}, {"pipeline": 2}),
    "interleaved": ({"engine": "ddp", "pp_size": 2, "pp_stages_per_process": 2}, {"pipeline": 2, "virtual": 2}),
    "sp": ({"engine": "ddp", "sp_size": 2}, {"sequence": 2}),
}
"""The value of `parallel`, and the layout that it means."""
ROWS, MICRO_BATCH = 16, 4
"""Rows of a step of the layouts, over all processes."""
SHAPES = [
    pytest.param(("tiny_gpt2", 64), id="gpt2"),
    *(
        pytest.param((preset, length), id=f"{preset}, {length}", marks=pytest.mark.nightly)
        for preset, length in (("tiny_gpt2", 256), ("tiny_llama", 64), ("tiny_llama", 256))
    ),
]
"""Preset and positions of a row."""


def settings(name: str, stage: str, store: Path) -> dict[str, Any]:
    """The parameter JSON of a run of the size `name` under a stage of DeepSpeed."""
    made = of_preset("tiny_gpt2", LENGTHS[name], {"engine": "deepspeed", **STAGES[stage]}, store)
    architecture = {**made["architecture"], **SIZES[name]}
    return {**made, "architecture": architecture, "micro_batch_size": MICRO_BATCHES[name]}


def of_preset(preset: str, length: int, parallel: Mapping[str, Any], store: Path) -> dict[str, Any]:
    """The parameter JSON of two steps of a preset, with rows of `length` positions."""
    raw = json.loads((PRESETS / f"{preset}.json").read_text())
    return {
        **raw, "data": {"train": [str(store)], "sequence_length": length}, "evaluation": None, "trackers": [],
        "max_steps": 2, "batch_size": {"-1": ROWS}, "micro_batch_size": MICRO_BATCH, "parallel": dict(parallel),
        "precision": "fp32" if preset.startswith("tiny") else "bf16",
    }  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store."""
    return toy.make_store(tmp_path_factory.mktemp("memory") / "train", documents=60, seed=1)


@dataclass(frozen=True)
class Measured:
    """Stage -> the memory that each of two processes held, in a run of the size `name`."""

    name: str
    held: dict[str, list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=["toy", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tiny_gpt2", "short rows"))],
)
def measured(request: pytest.FixtureRequest, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The memory of a run of each size."""
    base = tmp_path_factory.mktemp("measured")
    stages = wanted(request, "stage")
    jobs = [{"settings": settings(request.param, stage, store), "out": str(base / stage)} for stage in stages]
    work = partial(memory_worker.run, jobs)
    toy.finish(worlds.start(work, (2,), base / "said"))
    held = {stage: [json.loads((base / stage / f"{rank}.json").read_text()) for rank in range(2)] for stage in stages}
    return Measured(request.param, held)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", at_night(STAGES, always=["3"]))
def test_the_estimate_of_a_stage_matches_every_rank(stage: str, store: Path, measured: Measured) -> None:
    parameters = Parameters.from_dict(settings(measured.name, stage, store), source="test")
    found = estimate(parameters, processes=2, device="cpu").memory
    vocabulary = TokenStore.open(store).facts.vocabulary
    share = first_rank_batch(parameters.batch_size, parameters.micro_batch_size, replica_size=1, processes=2)
    parallel = parameters.parallel
    sharding = Sharding(2, parallel.zero_stage, share.micro_steps, offloaded=parallel.offloaded)
    one = fake_step.simulate_step(
        parameters, vocabulary, rows=share.micro_batch_size, gradients_stay=sharding.gradients_stay, gpu=False
    )
    held = fake_step.model_sizes(parameters, vocabulary, context=64.0)
    between, host = (
        memory_per_process(one.windows, sharding, held)[fake_step.STEP],
        offloaded_memory(one.windows, sharding, held),
    )
    assert host == found.offloaded
    for real in measured.held[stage]:  # on a CPU, device and host share one memory
        assert found.peak + sum(host.values()) == pytest.approx(real["peak"], rel=0.1), found.moment
        assert sum(host.values()) == pytest.approx(real["rest"]["offloaded"], rel=0.05)
        for part in ("weights", "optimizer"):
            assert between[part] + host.get(part, 0) == pytest.approx(real["rest"][part], rel=0.1), part


@dataclass(frozen=True)
class Shape:
    """A preset with rows of `length` positions; by layout its parameters and the memory of two processes."""

    preset: str
    length: int
    parameters: dict[str, Parameters]
    held: dict[str, list[dict[str, Any]]]
    formula: list[Any] = field(default_factory=list)
    """What the formulas of the clusters family read of the model, once it was measured."""


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Shape:
    """The memory of runs of each layout."""
    base = tmp_path_factory.mktemp("layouts")
    preset, length = request.param
    names = wanted(request, "name")
    raw = {name: of_preset(preset, length, LAYOUTS[name][0], store) for name in names}
    parameters = {name: Parameters.from_dict(each, source=name) for name, each in raw.items()}
    for replica_size in (1, 2):
        mine = [name for name, each in parameters.items() if each.parallel.replica_size == replica_size]
        jobs = [{"settings": raw[name], "out": str(base / name)} for name in mine]
        work = partial(memory_worker.run, jobs)
        if mine:
            toy.finish(worlds.start(work, (2,), base / "said", replica_size=replica_size))
    held = {name: [json.loads((base / name / f"{rank}.json").read_text()) for rank in range(2)] for name in names}
    return Shape(preset, length, parameters, held)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_estimate_of_a_layout_matches_every_rank(name: str, shape: Shape) -> None:
    found = estimate(shape.parameters[name], processes=2, device="cpu").memory
    for real in shape.held[name]:
        within = 0.01 if name == "ddp" else 0.1
        assert found.peak == pytest.approx(real["peak"], rel=within), found.moment


@pytest.mark.nightly
def test_ddp_holds_gradients_only_in_its_buckets(store: Path, tmp_path: Path) -> None:
    raw = of_preset("tiny_gpt2", 8, {"engine": "ddp"}, store)  # short rows, so that gradients are most of the memory
    settings = {steps: {**raw, "micro_batch_size": ROWS // 2 // steps} for steps in (1, 2)}
    jobs = [{"settings": each, "out": str(tmp_path / str(steps))} for steps, each in settings.items()]
    toy.finish(worlds.start(partial(memory_worker.run, jobs), (2,), tmp_path / "said"))
    for steps, each in settings.items():
        found = estimate(Parameters.from_dict(each, source="test"), processes=2, device="cpu").memory
        for rank in range(2):
            real = json.loads((tmp_path / f"{steps}/{rank}.json").read_text())
            rest = real["rest"]
            assert real["peak"] == pytest.approx(found.peak, rel=0.01)
            assert real["first"] + rest["optimizer"] <= 1.01 * found.peak, "a resumed run has this state, too"
            assert (rest["gradients"] > 0.9 * rest["weights"]) if steps > 1 else rest["gradients"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pp", "interleaved"])
def test_between_steps_a_pipeline_holds_only_weights_and_state(name: str, shape: Shape) -> None:
    for real in shape.held[name]:
        rest = real["rest"]
        assert rest["all"] == pytest.approx(rest["weights"] + rest["optimizer"], rel=0.01)
        assert real["places"][0] <= 1, "the buffer of the first micro-batch, if it comes from another stage"
        assert max(real["places"]) < 2 * ROWS // MICRO_BATCH, "the buffers of all micro-batches, in both directions"


@pytest.mark.parametrize("name", at_night(LAYOUTS, always=["ddp", "fsdp"]))
def test_the_formula_of_a_layout_matches_its_memory(name: str, shape: Shape, store: Path) -> None:
    pytest.importorskip("terakoya_clusters", reason="the formulas are the family's")
    from terakoya_clusters.layouts.cluster import Layout
    from terakoya_clusters.layouts.measured_model import measure_transformer
    from terakoya_clusters.layouts.rank_memory import rank_memory
    from terakoya_clusters.layouts.suggest import engine_program

    parameters = Parameters.from_dict(of_preset(shape.preset, shape.length, {"engine": "ddp"}, store), source="test")
    if not shape.formula:
        vocabulary = TokenStore.open(store).facts.vocabulary
        shape.formula.extend(measure_transformer(parameters, vocabulary, context=float(shape.length)))
    model, state = shape.formula
    parallel, axes = LAYOUTS[name]
    steps = ROWS // MICRO_BATCH // axes.get("data", 1)
    layout = Layout(micro_batch_size=MICRO_BATCH, micro_steps=steps, **axes)
    said = sum(rank_memory(model, layout, engine_program(parallel, model, state, parameters.precision)).values())
    assert 0.9 < said / max(each["peak"] for each in shape.held[name]) < 1.1
