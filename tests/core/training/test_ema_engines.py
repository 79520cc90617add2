"""The moving average of the weights where processes divide them: that of one process, the same after a resume, and
taken on by another engine."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import engine_runs
import pytest
import torch
import toy
import worlds
from engine_runs import LAST, MIDDLE, assert_close, checkpoint, here
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from terakoya.conversion.export import export
from terakoya.runs.checkpoints import find_problems, read_manifest
from terakoya.toolkit.formats import folder_digests
from terakoya.training.checkpoint.event_tensors import SavedEventTensors, plugins_in

LLAMA = {
    "type": "llama", "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 34, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    "tensor": {"tp_size": 2},
    "pipeline": {"pp_size": 2},
}
DIVIDED = ("fsdp", "tensor", "pipeline")
ON_FROM = {"tensor": "fsdp", "pipeline": "tensor", "fsdp": "pipeline"}
"""The engine whose checkpoint another takes on."""
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def settings(store: Path, parallel: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a run that averages after each step from the first on."""
    one = {"-1": 4} if parallel is None else {"0": 2, "1": 2}
    return {
        **toy.parameters(store, batch_size=one, micro_batch_size=2, max_steps=LAST),
        "architecture": LLAMA,
        "objective": {"type": "causal_lm", "append_eos": False},
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "eps": 1.0},
        "events": {"ema": {"decay": 0.6, "from_step": 1}},
        "checkpoint": {"save_steps": MIDDLE},
        **({} if parallel is None else {"parallel": parallel}),
        **changes,
    }


def averages(out: Path, step: int = LAST) -> dict[str, torch.Tensor]:
    assert plugins_in(checkpoint(out, step)) == ["ema"] and find_problems(checkpoint(out, step)) == []
    return dict(SavedEventTensors(checkpoint(out, step), "ema"))


@pytest.fixture(scope="module")
def runs(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    base = tmp_path_factory.mktemp("ema")
    here(base / "one", settings(store))
    jobs = []
    for name, parallel in ENGINES.items():
        saving = {"checkpoint": {"save_steps": MIDDLE, "async_save": name == "tensor"}}
        jobs.append({"out": str(base / name), "settings": settings(store, parallel, **saving)})
        if name in DIVIDED:
            begin = str(checkpoint(base / name, MIDDLE))
            jobs.append({"out": str(base / f"{name}_resumed"), "settings": jobs[-1]["settings"], "start_from": begin})
    for name, source in ON_FROM.items():
        begin = str(checkpoint(base / source, MIDDLE))
        values = settings(store, ENGINES[name])
        jobs.append({"out": str(base / f"{name}_on"), "settings": values, "start_from": begin})
    toy.finish(worlds.start(partial(worlds.train, jobs), (1, 1), base / "said"))
    return base


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENGINES, *(f"{name}_on" for name in ON_FROM)])
def test_the_average_is_that_of_one_process(runs: Path, name: str) -> None:
    assert_close(averages(runs / "one"), averages(runs / name), 1e-6)
    assert read_manifest(checkpoint(runs / name, LAST))["events"]["ema"] == {"updates": LAST - 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_a_resumed_run_has_the_same_average_bit_for_bit(runs: Path, name: str) -> None:
    assert set(toy.losses(runs / f"{name}_resumed")) == set(range(MIDDLE + 1, LAST + 1))
    assert_close(averages(runs / name), averages(runs / f"{name}_resumed"), 0.0)


@pytest.mark.slow
def test_each_process_keeps_and_writes_its_part(runs: Path) -> None:
    """Rank 0 alone under DDP, else each about half of the elements."""
    sizes: dict[str, list[int]] = {}
    for name in ENGINES:
        folder = checkpoint(runs / name, LAST) / "events"
        sizes[name] = []
        for path in sorted(folder.iterdir(), key=lambda path: len(path.name)):
            with safe_open(path, "pt") as file:
                sizes[name].append(sum(file.get_tensor(key).numel() for key in file.keys()))  # noqa: SIM118
    whole = sizes["ddp"][0]
    assert len(sizes["ddp"]) == 1 and all(sum(each) == whole for each in sizes.values())
    assert all(len(sizes[name]) == 2 and max(sizes[name]) < 0.7 * whole for name in DIVIDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_it_is_exported_as_a_model(runs: Path, name: str, tmp_path: Path) -> None:
    export(runs / name, tmp_path / "model", weights="ema")
    values = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for key, value in averages(runs / name).items():
        assert torch.equal(values[key.removeprefix("model.")], value), key
    # no checkpoint holds these weights as its model's
    assert "checkpoint" not in json.loads((tmp_path / "model" / folder_digests.NAME).read_text(encoding="utf-8"))


@pytest.mark.nightly
@needs_deepspeed
def test_zero_averages_as_one_process_does(store: Path, tmp_path: Path) -> None:
    here(tmp_path / "one", settings(store))
    jobs = []
    for stage in engine_runs.STAGES:
        out = tmp_path / str(stage)
        values = settings(store, {"engine": "deepspeed", "zero_stage": stage})
        jobs.append({"out": str(out), "settings": values})
        jobs.append({"out": f"{out}_resumed", "settings": values, "start_from": str(checkpoint(out, MIDDLE))})
        before = tmp_path / str((stage - 1) % 4)
        jobs.append({"out": f"{out}_on", "settings": values, "start_from": str(checkpoint(before, MIDDLE))})
    first = jobs.pop(2)
    toy.finish(engine_runs.start([*jobs, first], tmp_path / "jobs", 2))
    for stage in engine_runs.STAGES:
        for run in (f"{stage}", f"{stage}_on"):
            assert_close(averages(tmp_path / "one"), averages(tmp_path / run), 1e-6)
        assert_close(averages(tmp_path / f"{stage}"), averages(tmp_path / f"{stage}_resumed"), 0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [{"engine": "fsdp", "dp_shard_size": 2}, {"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_of_several_replicas_the_first_averages(parallel: dict[str, Any], store: Path, tmp_path: Path) -> None:
    here(tmp_path / "one", settings(store))
    values = settings(store, parallel)
    jobs = [
        {"out": str(tmp_path / "run"), "settings": values},
        {"out": str(tmp_path / "again"), "settings": values, "start_from": str(checkpoint(tmp_path / "run", MIDDLE))},
    ]
    toy.finish(worlds.start(partial(worlds.train, jobs), (2, 2), tmp_path / "said"))
    assert_close(averages(tmp_path / "one"), averages(tmp_path / "run"), 1e-6)
    assert_close(averages(tmp_path / "run"), averages(tmp_path / "again"), 0.0)
