"""A run at s3:// through s3fs, against a stand-in for S3: it is mirrored, and another machine continues it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import toy
from killed_machines import kill_and_replace

from terakoya.errors import TemporaryFailure, UserError
from terakoya.launch.here import train
from terakoya.runs.checkpoints import find_newest_whole
from terakoya_places import run_objects
from terakoya_places.object_folder import ObjectFolder

pytest.importorskip("s3fs", reason="s3fs is not installed")


@pytest.fixture
def bucket(aws: str) -> str:
    """The address of a bucket of an account that the store's library finds in its variables."""
    import fsspec

    fsspec.get_filesystem_class("s3").clear_instance_cache()
    return "s3://models"


@pytest.mark.slow
def test_a_run_and_its_store_on_s3_go_on_elsewhere(
    aws: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = toy.make_store(tmp_path / "data", documents=100, seed=1)
    data = ObjectFolder(f"{bucket}/store")
    for file in store.rglob("*"):
        if file.is_file():
            data.upload(file, file.relative_to(store).as_posix())
    on_disk = toy.parameters(store, max_steps=4, checkpoint={"save_steps": 2, "keep": 2})
    settings = {**on_disk, "data": {**on_disk["data"], "train": [data.address]}}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    address = f"{bucket}/run"
    train(settings, address, work_folder=tmp_path / "first")
    there = ObjectFolder(address)
    assert list(run_objects.checkpoint_steps(run_objects.find_committed(there.sizes()))) == [2, 4]
    assert {"metrics.jsonl", "parameters.json"} <= there.sizes().keys()
    for name in there.sizes():
        assert aws.encode() not in there.read(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    longer = {**settings, "max_steps": 6}
    result = train(longer, address, work_folder=tmp_path / "second", allow_change=["max_steps"])
    assert result.step == 6
    assert [step["step"] for step in toy.records(tmp_path / "second", "resume").values()] == [4]
    assert list(run_objects.checkpoint_steps(run_objects.find_committed(there.sizes()))) == [4, 6]
    train(on_disk, tmp_path / "alone")
    train({**on_disk, "max_steps": 6}, tmp_path / "alone", allow_change=["max_steps"])
    ends = [find_newest_whole(folder / "checkpoints")[0] for folder in (tmp_path / "second", tmp_path / "alone")]
    states = [json.loads((end / "manifest.json").read_bytes())["files"] for end in ends if end is not None]
    tensors = [{name: facts for name, facts in files.items() if name.startswith("state/")} for files in states]
    assert tensors[0] == tensors[1] and len(tensors[0]) == 2


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_machine_is_replaced_by_a_bare_one(bucket: str, tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "data", documents=200, seed=1)
    settings = toy.parameters(store, max_steps=48, checkpoint={"save_steps": 8})
    account = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    kill_and_replace(settings, Path(f"{bucket}/killed"), tmp_path, environment=account)


@pytest.mark.slow
def test_runs_whose_names_begin_alike_are_apart(bucket: str) -> None:
    for name in ("run", "run2", "run-3"):
        ObjectFolder(f"{bucket}/alike/{name}").write("metrics.jsonl", name.encode())
    assert list(ObjectFolder(f"{bucket}/alike/run").sizes()) == ["metrics.jsonl"]


@pytest.mark.slow
def test_what_cannot_be_used_is_said_at_the_start(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    settings = toy.parameters(toy.make_store(tmp_path / "data", documents=20, seed=1), max_steps=1)
    with pytest.raises(UserError, match=r"s3://nobody-s/run: .*no such bucket"):
        train(settings, "s3://nobody-s/run", work_folder=tmp_path / "a")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TemporaryFailure, match=r"s3://models/run/writer.json: the store does not answer"):
        train(settings, f"{bucket}/run", work_folder=tmp_path / "b")
