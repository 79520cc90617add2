"""`status`, `export` and `verify` of a run at an address."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import toy
from checkpoint_folders import write_checkpoint
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.errors import UserError
from terakoya.inference.loading import find_models
from terakoya.launch.here import train
from terakoya.places import open_views
from terakoya.runs.checkpoints import find_problems
from terakoya.runs.finding import find_checkpoint
from terakoya.runs.status import read
from terakoya_places import run_view
from terakoya_places.object_folder import ObjectFolder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectFolder]:
    """A finished run of two steps at an address, and its store next to it."""
    folder = tmp_path_factory.mktemp("trained")
    store = toy.make_store(folder / "data", documents=60, seed=1)
    address = f"file://{folder}/bucket"
    train(toy.parameters(store, max_steps=2, checkpoint={"save_steps": 1}), f"{address}/run", work_folder=folder / "w")
    (folder / "bucket/store").symlink_to(store)
    yield ObjectFolder(f"{address}/run")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(build_app(), list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return " ".join(result.output.split())


def test_status_knows_all_of_it(trained: ObjectFolder) -> None:
    (status,) = json.loads(CliRunner().invoke(build_app(), ["status", trained.address, "--json"]).stdout)
    assert (status["state"], status["step"], status["checkpoint"]["name"]) == ("finished", 2, "step-00000002")
    assert not status["problems"]
    assert trained.address in invoke("status", trained.address)
    assert "expected a run, as" in repr(
        CliRunner().invoke(build_app(), ["status", f"{trained.address}/none"]).exception
    )


@pytest.mark.usefixtures("forks")
def test_its_checkpoints_are_fetched_to_be_exported(trained: ObjectFolder, tmp_path: Path) -> None:
    invoke("export", trained.address, "--out", str(tmp_path / "model"))
    assert (tmp_path / "model/model.safetensors").is_file()
    first = find_checkpoint(Path(f"{trained.address}@1"))
    assert first.name == "step-00000001" and first.is_relative_to(tmp_path / "cache")
    changed = (first / "manifest.json").stat().st_mtime_ns
    assert find_checkpoint(Path(f"{trained.address}@1")) == first
    assert (first / "manifest.json").stat().st_mtime_ns == changed, "it was here"
    assert find_models(Path(f"{trained.address}@1")) == first / "model", "as `try` does"
    assert find_models(Path(trained.address)).parent.name == "step-00000002"
    with pytest.raises(UserError, match="expected a checkpoint of step 7, found those of 1, 2"):
        find_checkpoint(Path(f"{trained.address}@7"))


def test_several_may_fetch_one_checkpoint_at_the_same_time(trained: ObjectFolder) -> None:
    """Those of an evaluation on all GPUs, say: one fetches it, the others find it."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run_view.fetch_checkpoint, [trained.address] * 4))
    assert len(set(found)) == 1 and not find_problems(found[0])


def test_verify_reads_what_is_there(trained: ObjectFolder) -> None:
    said = invoke("verify", trained.address)
    assert (
        said.count("whole; all files have their hashes") == 2 and f"{trained.address}/checkpoints/step-00000002" in said
    )
    store = trained.address.replace("bucket/run", "bucket/store")
    assert "a token store; all files have their hashes" in invoke("verify", store)


def test_damage_there_is_found(tmp_path: Path) -> None:
    run = ObjectFolder("memory://bucket/run")
    try:
        write_checkpoint(tmp_path, 4)
        for path in tmp_path.rglob("*"):
            if path.is_file():
                run.write(path.relative_to(tmp_path).as_posix(), path.read_bytes())
        run.write("checkpoints/step-00000004/state/model-00000.safetensors", bytes(100))
        run.remove(["checkpoints/step-00000004/state/optimizer-00000.safetensors"])
        problem = repr(CliRunner().invoke(build_app(), ["verify", run.address]).exception)
        assert "2 problems" in problem
        with pytest.raises(UserError, match=r"expected a whole checkpoint, found none:\n.*model-00000"):
            find_checkpoint(Path(run.address))
        run.remove(["checkpoints/step-00000004/manifest.json"])
        with pytest.raises(UserError, match=r"found neither metrics\.jsonl nor a checkpoint there"):
            find_checkpoint(Path(run.address))
    finally:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_run_whose_log_grows_counts_as_one_that_trains(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket/run"
    write_checkpoint(bucket, 4)
    (bucket / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": kind, "step": 4, "time": time.time()}) + "\n" for kind in ("start", "checkpoint"))
    )
    (bucket / "writer.json").write_text(json.dumps({"writer": "1", "host": "spot-7", "process": 12}))
    address = Path(f"file://{bucket}")
    with open_views([address]) as (folder,):
        assert read(folder).state in ("training", "starting") and "spot-7" in (folder / "run.lock").read_text()
    with (bucket / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 5, "time": time.time() - 30}) + "\n")
    os.utime(bucket / "writer.json", (time.time() - 60,) * 2)
    with open_views([address]) as (folder,):
        assert read(folder).told.startswith("training: pid 12 on spot-7"), "since the process began to write there"
    hour = time.time() - 3600
    os.utime(bucket / "metrics.jsonl", (hour, hour))
    with open_views([address, tmp_path]) as (folder, same):
        assert read(folder).state == "killed" and same == tmp_path
        assert not read(folder).problems
    (bucket / "checkpoints/step-00000004/state/model-00000.safetensors").unlink()
    with open_views([address]) as (folder,):
        assert "step-00000004 is damaged: state/model-00000.safetensors: missing" in read(folder).problems[0]
