"""A run of several processes begins with the weights of one process, to the bit, and none of them builds the whole."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import initial_worker
import pytest
import torch
import toy
import worlds
from selection import at_night, wanted

from terakoya.config.parameters import Parameters
from terakoya.plugins import registry
from terakoya.rows.stores import Stores
from terakoya.toolkit.formats import model_folder
from terakoya.training.checkpoint.state import SavedState
from terakoya.training.model.build import build_module
from terakoya.training.model.module_parts import named_values
from terakoya_contract.toy import values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # most of it is for the runs that all tests share

FSDP, TP, PP = {"engine": "fsdp"}, {"tp_size": 2}, {"pp_size": 2}
MASKED, CAUSAL = {"type": "masked_lm"}, {"type": "causal_lm", "append_eos": False}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "bert": MASKED, "electra": {"type": "replaced_token", "generator_size": "1/2", "sharing": "disentangled"},
    "modernbert": MASKED, "roberta": MASKED, "gpt2": CAUSAL, "llama": CAUSAL,
}  # fmt: skip
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}.fsdp": (name, FSDP) for name in OBJECTIVES},
    **{f"{name}.tp": (name, TP) for name in ("bert", "electra", "gpt2", "llama")},
    **{f"{name}.pp": (name, PP) for name in ("gpt2", "llama")},
}
"""What can be divided how: an architecture, and how two processes work together."""
STARTED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}.fsdp.started": (name, FSDP) for name in ("bert", "electra", "llama")},
    "gpt2.pp.started": ("gpt2", PP), "gpt2.tp.started": ("gpt2", TP),
}  # fmt: skip
CASES = {**DRAWN, **STARTED}
WRITTEN = ("bert.fsdp", "electra.fsdp", "modernbert.fsdp", "roberta.fsdp", "gpt2.pp", "llama.tp")
"""Those that also write their models."""
ALWAYS = ("electra.fsdp", "gpt2.pp", "llama.fsdp.started")
EACH = at_night(CASES, always=ALWAYS)
OTHER = 7
"""The seed of the weights in the folders that runs start from."""


def settings(store: Path, name: str, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a run: eight blocks, each of which is larger than all that is outside of them."""
    component = registry().component("architectures", name)
    sizes = {"hidden_size": 128, "embedding_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    architecture = {"type": name, **values(component)}
    architecture |= {key: size for key, size in sizes.items() if key in component.model_fields}
    return {
        **toy.parameters(store, max_steps=1), "architecture": architecture, "objective": OBJECTIVES[name], **changes
    }  # fmt: skip


def build(store: Path, name: str, **changes: Any) -> tuple[Parameters, Any]:
    """The parameters of a run and its module as one process initialises it."""
    parameters = Parameters.from_dict(settings(store, name, **changes), source="test")
    return parameters, build_module(parameters, Stores.open(parameters.data).vocabulary)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all jobs."""
    cases = wanted(request, "case")
    base = tmp_path_factory.mktemp("initial")
    jobs = []
    for name in {STARTED[case][0] for case in cases if case in STARTED}:
        parameters, module = build(store, name, seed=OTHER)
        for role, model in parameters.objective.exports(module).items():
            model.save_pretrained(base / f"{name}.folder" / role, max_shard_size="1MB")
    for case in cases:
        name, parallel = CASES[case]
        begin = {"start_from": str(base / f"{name}.folder")} if case in STARTED else {}
        raw = settings(store, name, parallel=parallel, **begin)
        jobs.append({"out": str(base / case), "settings": raw, "model": case in WRITTEN})
    toy.finish(worlds.start(partial(initial_worker.run, jobs), (2,), base / "said"))
    return base


@pytest.mark.parametrize("case", EACH)
def test_weights_are_those_of_one_process(runs: Path, store: Path, case: str) -> None:
    _, module = build(store, CASES[case][0], **({"seed": OTHER} if case in STARTED else {}))
    expected = dict(named_values(module))
    found = SavedState(runs / case, "model")
    assert found.names() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found(name), value), name


@pytest.mark.parametrize("case", EACH)
def test_no_process_holds_more_than_its_part_and_a_block(runs: Path, store: Path, case: str) -> None:
    parameters, module = build(store, CASES[case][0])
    whole = sum(value.nbytes for value in module.parameters())
    block = max(
        sum(value.nbytes for value in block.parameters())
        for model in parameters.objective.exports(module).values()
        for block in parameters.architecture.blocks(model)
    )
    for rank in range(2):
        held = json.loads((runs / case / f"{rank}.json").read_text())
        assert held["most"] <= 1.5 * held["own"] + block < whole, (held, block, whole)


@pytest.mark.parametrize("case", at_night(WRITTEN, always=set(WRITTEN).intersection(ALWAYS)))
def test_models_are_written_as_by_one_process_and_one_weight_at_a_time(
    runs: Path, store: Path, case: str, tmp_path: Path
) -> None:
    parameters, module = build(store, CASES[case][0])
    for name, model in parameters.objective.exports(module).items():
        model_folder.write(model, tmp_path / name)
        file = Path(name, "model.safetensors")
        assert (runs / case / "model" / file).read_bytes() == (tmp_path / file).read_bytes()
    sizes = [value.nbytes for value in module.parameters()]
    largest, whole = max(sizes), sum(sizes)
    assert json.loads((runs / case / "0.json").read_text())["writing"] <= 4 * largest < whole / 4
