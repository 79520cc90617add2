"""No error is silent: each of these runs ends with a message that says what to do."""

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import toy
from saved_weights import FAULTS

from terakoya.config.parameters import RESUME_MAY_CHANGE, Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.local_rendezvous import local_rendezvous
from terakoya.distributed.topology import LaunchInfo
from terakoya.errors import RankLostError, UserError
from terakoya.training.engines.tensor_shards import whole_shard
from terakoya.training.model import compilation
from terakoya.training.setup import StartOptions, train_in_this_process
from terakoya_forks.fork import fork
from terakoya_planning import dry_run as dry

GPT2 = {
    "type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def run(settings: dict[str, object], out: Path, **options: object) -> None:
    train_in_this_process(Parameters.from_dict(settings, source="test"), out, StartOptions(**options))  # type: ignore[arg-type]


@pytest.mark.slow
def test_gradients_that_are_never_finite_end_the_run_before_the_next_save(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, logging_steps=4, checkpoint={"save_steps": 4}, max_consecutive_skipped_steps=2)
    output = toy.train(settings, tmp_path / "run", plugins=FAULTS, environment={"FAULT": "nan:5"}, code=3)
    assert "step 8: loss or gradients were not finite in 3 steps in a row" in output
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000004"]
    assert toy.records(tmp_path / "run", "error")[8]["text"].startswith("step 8")


@pytest.mark.slow
def test_an_event_that_fails_on_one_rank_stops_all_and_is_named(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, batch_size={"0": 8, "1": 8})
    output = toy.train(
        settings, tmp_path / "run", nodes=(1, 1), plugins=FAULTS, code=2,
        environment={"FAULT": "raise:3", "FAULT_RANK": "1"},
    )  # fmt: skip
    assert "failed on 1 of 2 processes; rank 1 on" in output
    assert "the plugin gave up" in output and "faults" in output
    assert max(toy.records(tmp_path / "run")) == 4  # rank 0 learns of it during the step after


@pytest.mark.nightly
def test_an_event_that_fails_after_the_last_step_is_not_lost(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=2)
    output = toy.train(settings, tmp_path / "run", plugins=FAULTS, code=2, environment={"FAULT": "saved:2"})
    assert "the plugin gave up" in output
    assert (tmp_path / "run/checkpoints/step-00000002/manifest.json").is_file()


@pytest.mark.slow
def test_the_processes_that_came_up_are_compared_with_the_table_first(store: Path, tmp_path: Path) -> None:
    output = toy.train(toy.parameters(store), tmp_path / "run", nodes=(1, 1), code=2)
    assert "the table is for 1 node, but the run has 2 processes on 2 nodes" in output
    assert '{"0": 8, "1": 8}' in output
    output = toy.train(toy.parameters(store), tmp_path / "run", "--processes", "3", nodes=(2,), code=2)
    assert "--processes 3, but torchrun started 2" in output


def hold(folder: str, ready: object, leave: object) -> None:
    from terakoya.runs.folder import lock_run

    lock_run(Path(folder) / "run.lock")
    ready.set()  # type: ignore[attr-defined]
    leave.wait(30)  # type: ignore[attr-defined]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"], ids=["own store", "torch's store"])
def test_a_port_that_another_program_uses_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(UserError, match=rf"MASTER_PORT {port}: another program .*; set another one for all"),
            local_rendezvous(LaunchInfo(0, 2, 0, 0, "torchrun")),
        ):
            dist.TCPStore(address, port, is_master=True, wait_for_workers=False)


@pytest.mark.slow
def test_two_runs_never_share_a_folder(store: Path, tmp_path: Path) -> None:
    context = toy.FORKSERVER
    ready, leave = context.Event(), context.Event()
    holder = toy.fork(hold, str(tmp_path), ready, leave)
    assert ready.wait(60)
    with pytest.raises(UserError, match=rf"is in use by pid {holder.pid} on "):
        run(toy.parameters(store, max_steps=1), tmp_path)
    leave.set()
    holder.join(30)
    run(toy.parameters(store, max_steps=1), tmp_path)  # the lock of a process that has exited is free


@pytest.mark.slow
def test_resuming_with_other_parameters_is_refused_unless_allowed(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=2)
    run(settings, tmp_path)
    changed = {**settings, "max_steps": 3, "optimizer": {"type": "adamw", "learning_rate": 0.001}}
    with pytest.raises(
        UserError, match=r"other values of optimizer.learning_rate;.*--allow-change optimizer.learning_rate"
    ):
        run(changed, tmp_path)
    run(changed, tmp_path, allow_change=frozenset({"optimizer.learning_rate"}))
    assert sorted(toy.records(tmp_path)) == [1, 2, 3]
    for other in ({"type": "lion", "learning_rate": 0.001}, {**changed["optimizer"], "bias_correction": False}):
        with pytest.raises(UserError, match=r"other values of optimizer\.(type|bias_correction), which determine what"):
            run({**changed, "optimizer": other, "max_steps": 4}, tmp_path, allow_change=frozenset({"optimizer"}))
    for allowed in (frozenset[str](), frozenset({"batch_size"})):
        with pytest.raises(UserError, match="cannot change either, or start a new run from an export"):
            run({**changed, "max_steps": 4, "batch_size": {"-1": 8}}, tmp_path, allow_change=allowed)


def test_a_store_of_another_tokenizer_is_refused_whatever_is_allowed(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=1)
    run(settings, tmp_path / "run")
    other = toy.make_store(tmp_path / "other", documents=20, seed=1, vocabulary=204)
    settings = {**settings, "max_steps": 2, "data": {"train": [str(other)], "sequence_length": 32}}
    with pytest.raises(UserError, match="data: the stores have another vocabulary than those of the checkpoint"):
        run(settings, tmp_path / "run", allow_change=frozenset({"data"}))
    with pytest.raises(UserError, match="data: the stores have another vocabulary than those of the checkpoint"):
        fork(tmp_path / "run", tmp_path / "new", [f'data.train=["{other}"]', "max_steps=2"])


def test_another_store_under_the_same_name_is_refused(store: Path, validation_store: Path, tmp_path: Path) -> None:
    moved = tmp_path / "store"
    moved.symlink_to(store)
    settings = toy.parameters(moved, max_steps=1)
    run(settings, tmp_path / "run")
    moved.unlink()
    moved.symlink_to(validation_store)
    other_validation = {**settings["data"], "validation": [str(store)]}
    for data in (settings["data"], other_validation):
        with pytest.raises(UserError, match="not the ones this run was started with"):
            run({**settings, "data": data, "max_steps": 2}, tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as in test_compile
def test_every_key_that_may_change_can_change_on_resume(
    store: Path,
    validation_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilation, "BACKEND", compilation.TRACE_ONLY)
    choose = compilation.choose

    def choose_for_gpu(parameters: Parameters, device: torch.device, *, processes: int) -> compilation.Choice:
        recorded = compilation.Choice("whole", cuda_graphs=True)
        return recorded if parameters.cuda_graphs is True else choose(parameters, device, processes=processes)

    monkeypatch.setattr(compilation, "choose", choose_for_gpu)
    monkeypatch.setattr(compilation, "GRAPH_OPTIONS", {})  # which only the compiler for GPUs knows
    settings = toy.parameters(store, validation_store, max_steps=1, architecture=GPT2, objective={"type": "causal_lm"})
    settings["evaluation"]["batches"] = 1
    other = toy.make_store(tmp_path / "validation", documents=20, seed=7)
    changes: list[dict[str, Any]] = [
        {
            "max_steps": 2, "max_minutes": 5, "logging_steps": 2, "trackers": [], "checkpoint": {"save_steps": 2},
            "data": {**settings["data"], "validation": [str(other)], "skip_steps": [[3, 3]]}, "batch_size": {"0": 16},
            "micro_batch_size": 3, "on_lost_node": "redistribute", "activation_checkpointing": "full",
            "max_consecutive_skipped_steps": 1, "spikes": None, "parallel": {"timeout_seconds": 60},
            "objective": {"type": "causal_lm", "head_positions": 64}, "events": {"early_stopping": {}},
            "compile": "blocks", "profile": {"steps": [2, 2]}, "deterministic": False,
        },
        {
            "max_steps": None, "epochs": 1, "evaluation": None, "autocast": True, "fused_kernels": "off",
            "cuda_graphs": True,
        },
        {"max_steps": None, "max_tokens": 600},
    ]  # fmt: skip
    keys = {key for each in changes for key in each} - {"data", "objective"}
    assert keys | {"data.validation", "data.skip_steps", "objective.head_positions"} == RESUME_MAY_CHANGE
    run(settings, tmp_path / "run")
    for number, change in enumerate(changes):
        out = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", out)
        run({**settings, **change}, out)
        assert "resumed from" in capsys.readouterr().err, change
        assert len(toy.records(out, "resume")) == 1 and max(toy.records(out)) > 1, change
    lines = map(json.loads, (tmp_path / "0/metrics.jsonl").read_text().splitlines())
    warnings = [line["text"] for line in lines if line["kind"] == "warning"]
    assert f"{other}: the run has not validated on this store before; its losses start a new curve" in warnings


@pytest.mark.nightly
def test_a_missing_plugin_is_named_on_resume(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=1)
    toy.train(settings, tmp_path / "run", plugins=FAULTS)
    output = toy.train({**settings, "max_steps": 2}, tmp_path / "run", code=2)
    assert "plugin faults" in output and "is missing" in output


def test_rows_longer_than_the_positions_are_refused(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store)
    settings["data"]["sequence_length"] = 64
    with pytest.raises(UserError, match="sequence_length"):
        run(settings, tmp_path)


def test_a_folder_that_cannot_be_written_fails_at_once(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        run(toy.parameters(store), tmp_path / "file" / "run")


@pytest.mark.slow
def test_a_dry_run_takes_a_step_and_writes_nothing(store: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    settings = toy.parameters(store, events={"permanent_checkpoints": {"every": 5}})
    output = toy.finish(toy.start(settings, tmp_path / "run", "--dry-run", folder=tmp_path.parent))
    assert "one step: loss 5." in output and "GB are free" in output
    assert "disk: 5 checkpoints and one being written need" in output  # checkpoint.keep, and those of steps 5 and 10
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "full_module", "numbers"),
    [
        ({}, True, 3 * 400),
        ({}, False, 3 * 300 + 100),
        ({"checkpoint": {"save_steps": 5, "model": "never"}}, True, 3 * 300),
        ({"events": {"ema": {}}}, True, 3 * 500),
    ],
)
def test_a_dry_run_counts_what_checkpoints_hold(changes: dict[str, Any], full_module: bool, numbers: int) -> None:
    """Of 100 weights and two moments each; without a model in each checkpoint, and with an average in each."""
    trainer: Any = SimpleNamespace(
        parameters=Parameters.from_dict(toy.parameters(Path("store"), **changes), source="test"),
        facts={"parameter_count": 100, "trained_parameter_count": 100},
        engine=SimpleNamespace(full_module=full_module),
    )
    assert dry._checkpoint_bytes(trainer, 3) == 4 * numbers


ADAPTERS = {"start_from": "model", "lora": {}}


@pytest.mark.parametrize(
    ("changes", "full_module", "state", "model"),
    [
        ({}, True, 300, 100),
        ({}, False, 300, 0),
        ({"checkpoint": {"save_steps": 5, "model": "never"}}, True, 300, 0),
        ({"events": {"ema": {}}}, True, 300 + 80, 100),
        (ADAPTERS, True, 30, 10),
        (ADAPTERS, False, 30, 0),
    ],
)
def test_a_dry_run_counts_what_background_saves_copy(
    changes: dict[str, Any], full_module: bool, state: int, model: int
) -> None:
    """Of 100 weights, 10 in adapters, two moments of each trained one, and averages of those that this process has. On
    a GPU each of two tensors takes pinned memory of a power of two: 128 and 512 bytes for 80 and 320."""
    trainer: Any = SimpleNamespace(
        parameters=Parameters.from_dict(toy.parameters(Path("store"), **changes), source="test"),
        facts={"parameter_count": 100, "trained_parameter_count": 10 if "lora" in changes else 100},
        engine=SimpleNamespace(full_module=full_module, weight_shards=lambda: [whole_shard("a", torch.zeros(80))]),
        run=SimpleNamespace(world_size=1, device=torch.device("cpu")), shapes={"a": (4, 5), "b": (80,)},
    )  # fmt: skip
    assert dry._snapshot_bytes(trainer) == (4 * state, 4 * model)
    trainer.run.device = torch.device("cuda", 0)
    assert dry._snapshot_bytes(trainer) == (round(6.4 * state), round(6.4 * model))


@pytest.mark.slow
def test_a_dry_run_asks_for_the_disk_that_the_run_does_not_have_yet(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry, "free_bytes", lambda out: 0)
    parameters = Parameters.from_dict(toy.parameters(store), source="test")
    with pytest.raises(UserError, match=r"needs 0\.00 GB, 0\.00 GB are free; see checkpoint\.keep and events"):
        dry.dry_run(parameters, tmp_path / "run", StartOptions())
    kept = tmp_path / "run/checkpoints/step-00000005"
    kept.mkdir(parents=True)
    (kept / "model.safetensors").write_bytes(bytes(1_000_000))
    dry.dry_run(parameters, tmp_path / "run", StartOptions())
    (tmp_path / "run/model-best").symlink_to(kept)
    (kept / "another").hardlink_to(kept / "model.safetensors")
    assert dry.held_bytes(tmp_path / "run") == 1_000_000


def test_processes_that_gloo_does_not_connect_are_told_of_the_variable_that_names_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "Gloo connectFullMesh failed with timed out connecting: remote=[127.0.0.1]:35743\n@ 0x7f"
    monkeypatch.setattr("accelerate.PartialState", MagicMock(side_effect=RuntimeError(said)))
    with pytest.raises(RankLostError, match=r"by gloo: .*:35743; where .* GLOO_SOCKET_IFNAME$"):
        connect(LaunchInfo(1, 2, 0, 1, "torchrun"))
    monkeypatch.setattr("accelerate.PartialState", MagicMock(side_effect=RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        connect(LaunchInfo(1, 2, 0, 1, "torchrun"))
