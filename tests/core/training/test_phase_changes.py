"""Phases beside the other parts of a run: what resumes may change, skipped steps, adapters, pipelines, slow endings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import nn

from terakoya import plugins
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import UserError
from terakoya.rows.stores import Stores
from terakoya.training.model.build import build_module
from terakoya.training.model.changed_settings import change_settings
from terakoya.training.model.module_parts import top_level_models
from terakoya.training.run_plan import make_plan
from terakoya.training.setup import StartOptions, train_in_this_process
from terakoya_forks.fork import fork

MODEL = {
    "type": "modernbert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64, "local_attention": 8, "global_rope_theta": 10_000.0,
}  # fmt: skip
LLAMA = {
    "type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
LONG = {"data": {"sequence_length": 64}, "architecture": {"global_rope_theta": 160_000.0}}
ALONE = Topology((ProcessInfo(0, 0, 0, "here"),))
PLUGIN = """
import time
from terakoya import hookimpl

@hookimpl
def run_finished(run, error):
    time.sleep(40 * (run.rank == 0))
"""


def settings(store: Path, **changes: Any) -> dict[str, Any]:
    return toy.parameters(
        store, **{"architecture": MODEL, "checkpoint": {"save_steps": 1, "keep": 9}, "max_steps": 4, **changes}
    )


def trained(raw: dict[str, Any], out: Path, *allowed: str) -> Path:
    parameters = Parameters.from_dict(raw, source=out.name)
    train_in_this_process(parameters, out, StartOptions(allow_change=frozenset(allowed)))
    return out


@pytest.mark.slow
def test_a_loss_may_get_another_term(store: Path, tmp_path: Path) -> None:
    """Its averages begin anew, in the middle of an interval."""
    causal = settings(
        store, architecture=LLAMA, objective={"type": "causal_lm"}, logging_steps=4, max_steps=2,
        schedule={"type": "constant"},
    )  # fmt: skip
    trained(causal, tmp_path / "run")
    changed = {**causal, "objective": {"type": "causal_lm", "z_loss": 1e-3}, "max_steps": 8}
    trained(changed, tmp_path / "run", "objective")
    records = toy.records(tmp_path / "run")
    assert records[4]["z_loss"] > 0 and abs(records[4]["loss"] - records[8]["loss"]) < 1


def base_of(model: Path) -> float:
    """The base of the rotary positions in the config of the folder `model`."""
    return float(json.loads((model / "config.json").read_text())["rope_parameters"]["full_attention"]["rope_theta"])


@pytest.mark.slow
def test_a_longer_run_does_not_go_back_to_an_earlier_phase(store: Path, tmp_path: Path) -> None:
    """Shares are those of the length of the run, so their borders move with it."""
    out = trained(settings(store, phases=[{"share": 0.5}, LONG]), tmp_path / "run")
    longer = settings(store, phases=[{"share": 0.5}, LONG], max_steps=8)
    with pytest.raises(
        UserError, match=r"up to step 4, .* phases began at steps 1, 3, but now they would .* at 1: give"
    ):
        trained(longer, out)
    trained({**longer, "phases": [{"share": 0.25}, LONG]}, out, "phases")
    manifest = json.loads((out / "checkpoints/step-00000008/manifest.json").read_text())
    assert manifest["phase"]["first_step"] == 2 and manifest["phase"]["steps"] == 6


@pytest.mark.slow
def test_a_fork_does_not_go_back_to_an_earlier_phase(store: Path, tmp_path: Path) -> None:
    """It is refused before anything is written, as its start would be."""
    out = trained(settings(store, phases=[{"share": 0.5}, LONG]), tmp_path / "run")
    with pytest.raises(UserError, match=r"phases began at steps 1, 3, but now they would have begun at 1: give"):
        fork(out, tmp_path / "new", ["max_steps=8"])
    other_rows = json.dumps([{"steps": 2, "batch_size": {"-1": 8}}, LONG])
    with pytest.raises(UserError, match=r"the 4 steps of the checkpoint took 64 rows, .* they take 48: keep"):
        fork(out, tmp_path / "new", ["max_steps=8", f"phases={other_rows}"])
    assert not (tmp_path / "new").exists()
    fork(out, tmp_path / "new", ["max_steps=8", f"phases={json.dumps([{'share': 0.25}, LONG])}"])


@pytest.mark.slow
def test_the_batch_of_a_phase_without_a_table_of_its_own_changes_with_consent(store: Path, tmp_path: Path) -> None:
    phases = [{"steps": 2, "batch_size": {"-1": 4}}, LONG]
    out = trained(settings(store, phases=phases), tmp_path / "run")
    for step in (2, 3, 4):
        shutil.rmtree(out / f"checkpoints/step-{step:08d}")
    changed = settings(store, phases=phases, batch_size={"-1": 8})
    with pytest.raises(UserError, match=r"started with other values of batch_size"):
        trained(changed, out)
    trained(changed, out, "batch_size")
    manifest = json.loads((out / "checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["consumed_rows"] == 2 * 4 + 2 * 8


def test_the_first_phase_has_its_positions_where_its_first_step_is_skipped(store: Path, tmp_path: Path) -> None:
    data = {"train": [str(store)], "sequence_length": 32, "skip_steps": [[1, 1]]}
    first = {"steps": 3, "architecture": {"global_rope_theta": 50_000.0}}
    out = trained(settings(store, phases=[first, {}], data=data), tmp_path / "run")
    assert base_of(out / "checkpoints/step-00000002/model") == 50_000.0
    assert base_of(out / "checkpoints/step-00000004/model") == 10_000.0


def test_a_store_that_a_phase_names_twice_has_both_weights(store: Path, validation_store: Path) -> None:
    mixture = [(store, 1.0), (store, 2.0), (validation_store, 1.0)]
    phase = {"data": {"train": [{"store": str(path), "weight": weight} for path, weight in mixture]}}
    parameters = Parameters.from_dict(settings(store, phases=[{"steps": 2}, phase]), source="test")
    loader = plan(parameters).loader
    assert [(source.store.folder, weight) for source, weight in loader.mixture_at(32)] == [
        (store, 3.0), (validation_store, 1.0)
    ]  # fmt: skip


def test_an_objective_whose_loss_would_change_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of retromae phases cannot change the weight; a plugin may name by mistake what `terms` reads."""
    retromae = plugins.registry().component("objectives", "retromae")
    changed = settings(
        store, objective={"type": "retromae"}, phases=[{"steps": 2}, {"objective": {"decoder_weight": 2}}]
    )
    with pytest.raises(UserError, match=r"phases\.1\.objective\.decoder_weight: cannot change during a run"):
        Parameters.from_dict(changed, source="test")
    monkeypatch.setattr(retromae, "phase_settings", frozenset({"decoder_weight"}))
    with pytest.raises(UserError, match=r"phases\.1\.objective: would change the terms of the loss"):
        plan(Parameters.from_dict(changed, source="test"))


def test_the_stages_of_a_pipeline_get_the_positions_of_the_phase(store: Path) -> None:
    raw = settings(
        store, architecture=LLAMA, objective={"type": "causal_lm"},
        phases=[{"steps": 2}, {"architecture": {"rope_theta": 160_000.0}}],
    )  # fmt: skip
    parameters = Parameters.from_dict(raw, source="test")
    vocabulary = Stores.open(parameters.data).vocabulary
    stages = nn.Module()
    for index in range(2):
        stage = build_module(parameters, vocabulary)
        (model,) = top_level_models(stage)
        parameters.architecture.keep_stage_blocks(model, range(index, index + 1))
        stages.add_module(f"stage{index}", stage)
    change_settings(stages, lambda: build_module(parameters.of_phases[1], vocabulary))
    for model in top_level_models(stages):
        frequencies = model.get_buffer("model.rotary_emb.inv_freq")
        assert torch.equal(frequencies, 1.0 / 160_000.0 ** (torch.arange(0, 8, 2) / 8))
        assert model.config.rope_parameters["rope_theta"] == 160_000.0


@pytest.mark.slow
def test_adapters_of_a_later_phase_are_exported(store: Path, tmp_path: Path) -> None:
    """Their base weights have the positions of the first phase."""
    export(trained(settings(store, max_steps=1), tmp_path / "base"), tmp_path / "model")
    adapted = settings(
        store, start_from=str(tmp_path / "model"), lora={"r": 2, "target_modules": "all-linear"},
        phases=[{"steps": 2}, LONG],
    )  # fmt: skip
    export(trained(adapted, tmp_path / "adapted"), tmp_path / "export")
    assert base_of(tmp_path / "export") == 160_000.0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mirrored", [False, True])
def test_what_rank_0_does_at_the_end_may_take_longer_than_ranks_wait_for_each_other(
    mirrored: bool, store: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "slow_end.py"
    plugin.write_text(PLUGIN)
    raw = settings(store, max_steps=2, parallel={"timeout_seconds": 15})
    place = ["--out", f"file://{tmp_path}/shelf", "--work-folder", str(tmp_path / "run")] if mirrored else []
    toy.train(raw, tmp_path / "run", *place, nodes=(2,), plugins=[plugin])
    assert toy.records(tmp_path / "run", "finished") and not toy.records(tmp_path / "run", "warning")


def plan(parameters: Parameters) -> Any:
    stores = Stores.open(parameters.data, [phase.data for phase in parameters.of_phases])
    return make_plan(parameters, stores, ALONE, 0)
