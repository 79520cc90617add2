"""A run at an address: what is in the store is whole, a store that fails ends no training, another machine goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
import toy
from checkpoint_folders import write_checkpoint, write_manifest
from fsspec.implementations.memory import MemoryFileSystem
from killed_machines import kill_and_replace, whole_steps

from terakoya.distributed.context import DistributedContext
from terakoya.errors import FileError, TemporaryFailure, UserError
from terakoya.launch.here import train
from terakoya.places import place_of
from terakoya.plugins import loading as plugins
from terakoya.runs.checkpoints import HASH_KEY, find_newest_whole, find_problems, list_checkpoints, with_hash
from terakoya.training.checkpoint.checkpoint import remove_checkpoint
from terakoya_places import keeping, run_objects, sender
from terakoya_places.object_folder import ObjectFolder
from terakoya_places.sender import Mirror


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_store(tmp_path_factory.mktemp("data") / "data", documents=200, seed=1)


@pytest.fixture
def memory() -> Iterator[ObjectFolder]:
    """An address in the memory of this process."""
    yield ObjectFolder("memory://bucket/run")
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sender, "RETRY_SECONDS", (0.01,))
    monkeypatch.setattr(sender, "LAST_ATTEMPTS", 3)


class Faulty(ObjectFolder):
    """A store in which the writes of objects that `refuses` says fail."""

    def __init__(self, address: str, refuses: Callable[[str], bool]) -> None:
        super().__init__(address)
        self.refuses = refuses
        self.refused: list[str] = []

    def _check(self, name: str) -> None:
        if self.refuses(name):
            self.refused.append(name)
            raise TemporaryFailure(f"{name}: the store does not answer")

    def upload(self, file: Path, name: str) -> None:
        self._check(name)
        super().upload(file, name)

    def write(self, name: str, content: bytes) -> None:
        self._check(name)
        super().write(name, content)


def send_all(store: ObjectFolder, run: Path, *, keep: int = 2) -> Mirror:
    """A mirror of `run` that has sent what it could."""
    mirror = Mirror(store, run, keep=keep)
    mirror.take_over()
    mirror.start()
    mirror.finish()
    assert mirror.has_ended(10)
    return mirror


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------ what is in the store


def test_all_of_a_run_is_sent_but_what_concerns_this_machine(memory: ObjectFolder, tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = write_checkpoint(run, 4)
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events").write_bytes(b"1")
    for own in ("run.lock", "save.request", "checkpoints/quarantine/step-00000002/manifest.json", ".nonce-1"):
        (run / own).parent.mkdir(parents=True, exist_ok=True)
        (run / own).write_bytes(b"1")
    assert send_all(memory, run).outcome() is None
    expected = {f"checkpoints/step-00000004/{path.relative_to(step)}" for path in step.rglob("*") if path.is_file()}
    assert memory.sizes().keys() == expected | {"metrics.jsonl", "tensorboard/events", "writer.json"}


def test_the_manifest_is_written_last_and_removed_first(memory: ObjectFolder, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    store = Faulty(memory.address, lambda name: name.endswith("optimizer-00000.safetensors"))
    mirror = send_all(store, tmp_path)
    assert (
        run_objects.checkpoint_steps(run_objects.find_committed(store.sizes())) == {}
    )  # half of it is there, and is no checkpoint
    assert "checkpoints/step-00000004/state/model-00000.safetensors" in store.sizes()
    assert isinstance(mirror.outcome(), TemporaryFailure) and "step-00000004" in str(mirror.outcome())
    store.refuses = lambda name: False
    assert send_all(store, tmp_path).outcome() is None and whole_steps(store) == [4]

    # the same step once more, with another content: while it is replaced there is none
    (folder / "state/model-00000.safetensors").write_bytes(b"other")
    write_manifest(folder, 4)
    store.refuses = lambda name: "state" in name
    send_all(store, tmp_path)
    assert whole_steps(store) == []
    run_objects.remove_checkpoint(memory, "checkpoints/step-00000004", memory.sizes())
    assert not [name for name in memory.sizes() if "step-00000004" in name]


def test_what_arrives_otherwise_is_no_checkpoint(
    memory: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 4)
    real = ObjectFolder.upload

    def upload(self: ObjectFolder, file: Path, name: str) -> None:
        if name.endswith("model-00000.safetensors"):
            self.write(name, bytes(100))
        else:
            real(self, file, name)

    monkeypatch.setattr(ObjectFolder, "upload", upload)
    mirror = send_all(memory, tmp_path)
    assert "another content arrived than was sent" in str(mirror.outcome()) and whole_steps(memory) == []


def test_a_checkpoint_that_is_damaged_here_is_not_sent(memory: ObjectFolder, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    damaged = write_checkpoint(tmp_path, 6)
    (damaged / "state/model-00000.safetensors").write_bytes(bytes(100))
    said: list[str] = []
    mirror = Mirror(memory, tmp_path, keep=2)
    mirror.say = said.append
    mirror.take_over()
    mirror.start()
    mirror.finish()
    assert mirror.has_ended(10) and whole_steps(memory) == [4]
    assert any("content changed; it is not mirrored" in each for each in said)
    assert "step-00000006" in str(mirror.outcome())


def test_pruned_here_is_pruned_there(memory: ObjectFolder, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    mirror = Mirror(memory, tmp_path, keep=2)
    mirror.take_over()
    mirror.start()
    wait_for(lambda: whole_steps(memory) == [2, 4, 6])
    remove_checkpoint(tmp_path / "checkpoints/step-00000002")
    wait_for(lambda: whole_steps(memory) == [4, 6])
    mirror.finish()
    assert mirror.has_ended(10)

    # a machine that has fetched the newest one keeps the older ones there until it has enough of its own
    other = tmp_path / "other"
    run_objects.fetch_newest(memory, other, memory.sizes())
    send_all(memory, other)
    assert whole_steps(memory) == [4, 6]
    write_checkpoint(other, 8)
    send_all(memory, other)
    assert whole_steps(memory) == [6, 8]


def test_a_store_that_fails_is_tried_again(memory: ObjectFolder, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    failures = iter([True] * 4)
    store = Faulty(memory.address, lambda name: "state" in name and next(failures, False))
    said: list[str] = []
    mirror = Mirror(store, tmp_path, keep=2)
    mirror.say = said.append
    mirror.take_over()
    mirror.start()
    wait_for(lambda: whole_steps(store) == [4])
    mirror.finish()
    assert mirror.has_ended(10) and mirror.outcome() is None
    assert "the store does not answer; the run continues, and the mirror tries again" in said[0]
    assert "takes files again" in said[-1]


def test_the_newest_process_alone_writes(memory: ObjectFolder, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    old = Mirror(memory, tmp_path, keep=2)
    old.take_over()
    old.start()
    wait_for(lambda: whole_steps(memory) == [4])
    new = Mirror(memory, tmp_path / "new", keep=2)
    new.take_over()
    new.start()
    write_checkpoint(tmp_path, 6)
    (tmp_path / "metrics.jsonl").write_text("of the old one")
    assert old.has_ended(10) and whole_steps(memory) == [4] and "metrics.jsonl" not in memory.sizes()
    assert "has taken this run over" in str(old.outcome()) and old.outcome().exit_code == 2  # type: ignore[union-attr]
    new.finish()
    assert new.has_ended(10)


def test_who_is_taken_over_while_it_sends_removes_nothing(memory: ObjectFolder, tmp_path: Path) -> None:
    """The machine that takes over fetches step 2, which this one would prune once step 4 is there."""
    write_checkpoint(tmp_path, 2)
    send_all(memory, tmp_path)
    remove_checkpoint(tmp_path / "checkpoints/step-00000002")
    write_checkpoint(tmp_path, 4)
    taken = []

    def take_over(name: str) -> bool:
        if name.endswith("step-00000004/manifest.json") and not taken:
            taken.append(Mirror(memory, tmp_path / "new", keep=1))
            taken[0].take_over()
        return False

    old = send_all(Faulty(memory.address, take_over), tmp_path, keep=1)
    assert old.lost is not None and whole_steps(memory) == [2, 4]


def test_an_error_that_nobody_has_foreseen_ends_no_mirror(memory: ObjectFolder, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)

    def fail(name: str) -> bool:
        if next(failures, False):
            raise RuntimeError("of a library")
        return False

    failures = iter([True] * 2)
    said: list[str] = []
    mirror = Mirror(Faulty(memory.address, lambda name: "state" in name and fail(name)), tmp_path, keep=2)
    mirror.say = said.append
    mirror.take_over()
    mirror.start()
    wait_for(lambda: whole_steps(memory) == [4])
    mirror.finish()
    assert mirror.has_ended(10) and mirror.outcome() is None
    assert said[0].startswith("memory://bucket/run: RuntimeError: of a library; the run continues")


# ----------------------------------------------------------------------------------------------------- fetched from it


def test_the_newest_whole_checkpoint_is_fetched(memory: ObjectFolder, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path / "run", step)
    send_all(memory, tmp_path / "run")
    memory.write("checkpoints/step-00000006/state/model-00000.safetensors", bytes(100))
    memory.write("checkpoints/step-00000008/state/model-00000.safetensors", bytes(100))  # an interrupted mirror
    folder, damaged = run_objects.fetch_newest(memory, tmp_path / "new", memory.sizes())
    assert folder is not None and folder.name == "step-00000004" and not find_problems(folder)
    assert list(damaged) == ["checkpoints/step-00000006"] and "content changed" in next(iter(damaged.values()))
    assert run_objects.fetch_newest(memory, tmp_path / "new", memory.sizes(), after=6) == (None, {})
    assert [step for step, _ in list_checkpoints(tmp_path / "new/checkpoints")] == [4]


@pytest.mark.parametrize(("damaged", "fetched"), [([], [6, 8]), ([6], [4, 8])])
def test_with_it_comes_the_one_to_which_the_run_may_go_back(
    damaged: list[int], fetched: list[int], memory: ObjectFolder, tmp_path: Path
) -> None:
    for step in (2, 4, 6, 7):
        write_checkpoint(tmp_path / "run", step)
    write_checkpoint(tmp_path / "run", 8, keep_before=6)
    send_all(memory, tmp_path / "run")
    for step in damaged:
        memory.write(f"checkpoints/step-0000000{step}/state/model-00000.safetensors", bytes(100))
    folder, found = run_objects.fetch_newest(memory, tmp_path / "new", memory.sizes())
    assert folder is not None and folder.name == "step-00000008" and len(found) == len(damaged)
    assert [step for step, _ in list_checkpoints(tmp_path / "new/checkpoints")] == fetched


def test_what_is_damaged_there_is_removed_by_who_continues(memory: ObjectFolder, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path / "run", step)
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    send_all(memory, tmp_path / "run")
    memory.write("checkpoints/step-00000006/state/model-00000.safetensors", bytes(100))
    (tmp_path / "new").mkdir()
    mirror = keeping._open(memory.address, tmp_path / "new", keep=2, start_over=False)
    mirror.finish()
    assert mirror.has_ended(10) and whole_steps(memory) == [2, 4]
    assert [step for step, _ in list_checkpoints(tmp_path / "new/checkpoints")] == [4]
    assert (tmp_path / "new/metrics.jsonl").read_text() == "{}\n"
    record = json.loads((tmp_path / "new/place.json").read_text())  # for the scripts of launchers
    assert record == {"address": memory.address, "fetched": "step-00000004"}


def test_a_checkpoint_appears_with_its_log(
    memory: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is killed before its log is here starts again: what it would send has no gap."""
    write_checkpoint(tmp_path / "run", 4)
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    send_all(memory, tmp_path / "run")
    seen = []
    real = run_objects.commit_folder

    def commit(draft: Path, final: Path) -> None:
        seen.append((tmp_path / "new/metrics.jsonl").read_text())
        real(draft, final)

    monkeypatch.setattr(run_objects, "commit_folder", commit)
    assert run_objects.fetch_newest(memory, tmp_path / "new", memory.sizes())[0] is not None and seen == ["{}\n"]


def test_what_is_damaged_here_is_fetched_whole(memory: ObjectFolder, tmp_path: Path) -> None:
    for step in (2, 4):
        write_checkpoint(tmp_path, step)
    send_all(memory, tmp_path)
    model = tmp_path / "checkpoints/step-00000004/state/model-00000.safetensors"
    content = model.read_bytes()
    model.write_bytes(content[::-1] if content[::-1] != content else bytes(len(content)))  # of the same size
    mirror = keeping._open(memory.address, tmp_path, keep=2, start_over=False)
    mirror.finish()
    assert mirror.has_ended(10) and model.read_bytes() == content and whole_steps(memory) == [2, 4]
    assert (tmp_path / "checkpoints/quarantine/step-00000004").is_dir()


def test_what_was_pruned_there_since_it_was_listed_is_looked_for_again(
    memory: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that still writes there sends step 4 and prunes step 2 while this one begins."""
    write_checkpoint(tmp_path / "run", 2)
    send_all(memory, tmp_path / "run")
    (tmp_path / "new").mkdir()
    real, listed = ObjectFolder.sizes, []

    def sizes(self: ObjectFolder, below: str = "") -> dict[str, int]:
        found = real(self, below)
        if not listed and below == "":
            listed.append(found)
            write_checkpoint(tmp_path / "run", 4)
            run_objects.send_checkpoint(
                memory, tmp_path / "run/checkpoints/step-00000004", "checkpoints/step-00000004", {}
            )
            run_objects.remove_checkpoint(memory, "checkpoints/step-00000002", found)
        return found

    monkeypatch.setattr(ObjectFolder, "sizes", sizes)
    mirror = keeping._open(memory.address, tmp_path / "new", keep=2, start_over=False)
    mirror.finish()
    assert mirror.has_ended(10) and [step for step, _ in list_checkpoints(tmp_path / "new/checkpoints")] == [4]


def test_a_disk_that_is_full_is_named(memory: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.write("metrics.jsonl", bytes(1000))
    full = Path("/dev/full")
    with pytest.raises(FileError, match="/dev/full: No space left on device; free some space"):
        memory.download("metrics.jsonl", full)


def test_expired_credentials_are_looked_for_again(memory: ObjectFolder) -> None:
    memory.write("a", b"1")
    refused = ClientError("ExpiredToken", "The provided token has expired.")

    class Expired(MemoryFileSystem):
        def cat_file(self, *_: Any, **__: Any) -> bytes:
            raise PermissionError(str(refused)) from refused  # as s3fs does

    memory._system = Expired(skip_instance_cache=True)
    with pytest.raises(TemporaryFailure, match=r"memory://bucket/run/a: the credentials have expired .*; renew them"):
        memory.read("a")
    assert memory.read("a") == b"1"  # a new session has found new ones


class ClientError(Exception):
    """An error as botocore raises it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.response = {"Error": {"Code": code, "Message": message}}


@pytest.mark.parametrize("name", ["../../outside", "/etc/outside"])
def test_a_manifest_names_no_file_outside(memory: ObjectFolder, tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "run", 2)
    send_all(memory, tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest[HASH_KEY]
    manifest["files"][name] = {"size": 0, "sha256": ""}
    memory.write("checkpoints/step-00000002/manifest.json", json.dumps(with_hash(manifest)).encode())
    _, damaged = run_objects.fetch_newest(memory, tmp_path / "new", memory.sizes())
    assert "not the name of a checkpoint's file" in damaged["checkpoints/step-00000002"]


# -------------------------------------------------------------------------------------------------- whole trainings


@pytest.mark.slow
def test_a_run_whose_checkpoints_there_are_all_damaged_does_not_start_over(
    memory: ObjectFolder, store: Path, tmp_path: Path
) -> None:
    settings = toy.parameters(store, max_steps=2, checkpoint={"save_steps": 1})
    train(settings, memory.address, work_folder=tmp_path / "first")
    assert whole_steps(memory) == [1, 2]
    assert {"metrics.jsonl", "parameters.json"} <= memory.sizes().keys()
    for step in (1, 2):
        memory.write(f"checkpoints/step-0000000{step}/state/model-00000.safetensors", b"")
    with pytest.raises(
        UserError, match=r"none of them is whole:\n.*step-00000002[^\n]*content changed\n[\s\S]*--start-over"
    ):
        train(settings, memory.address, work_folder=tmp_path / "second")
    assert train(settings, memory.address, work_folder=tmp_path / "second", start_over=True).step == 2
    assert whole_steps(memory) == [1, 2]
    with pytest.raises(UserError, match="expected the work folder of memory://other, got that of memory://bucket/run"):
        train(settings, "memory://other", work_folder=tmp_path / "second")


@pytest.mark.usefixtures("fresh_plugins")
def test_plugins_add_files_to_a_mirrored_run(
    memory: ObjectFolder, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = "from terakoya import hookimpl\n@hookimpl\ndef run_files(folder):\n    "
    last = "(folder / 'metrics.jsonl').read_text().splitlines()[-1]"
    for name, body in {"bad": "1 / 0", "notes": f"return {{'notes.txt': {last}}}"}.items():
        (tmp_path / f"{name}.py").write_text(head + body)
    plugins.load([str(tmp_path / f"{name}.py") for name in ("bad", "notes")])
    train(toy.parameters(store, max_steps=1), memory.address, work_folder=tmp_path / "run")
    assert json.loads(memory.read("notes.txt"))["kind"] == "finished"
    assert [each for each in caplog.messages if "was not written: plugin bad: ZeroDivisionError" in each]


@pytest.mark.slow
def test_a_store_that_refuses_all_ends_no_training(
    memory: ObjectFolder, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def upload(self: ObjectFolder, file: Path, name: str) -> None:
        raise TemporaryFailure(f"{name}: the store does not answer")

    monkeypatch.setattr(ObjectFolder, "upload", upload)
    settings = toy.parameters(store, max_steps=2)
    with pytest.raises(TemporaryFailure, match=r"not mirrored: checkpoints/step-00000002, .*the same command sends"):
        train(settings, memory.address, work_folder=tmp_path / "run")
    newest, _ = find_newest_whole(tmp_path / "run/checkpoints")
    assert newest is not None and newest.name == "step-00000002"
    said = (tmp_path / "run/metrics.jsonl").read_text() + caplog.text  # the run may end before the first attempt does
    assert "the mirror tries again" in said
    monkeypatch.undo()
    assert train(settings, memory.address, work_folder=tmp_path / "run").step == 2  # sends what was missing
    assert whole_steps(memory) == [2]


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [(1,), (2,)])
def test_a_killed_machine_is_replaced_by_a_bare_one(store: Path, tmp_path: Path, nodes: tuple[int, ...]) -> None:
    settings = toy.parameters(
        store, max_steps=48, checkpoint={"save_steps": 4}, batch_size={"0": 16} if nodes == (2,) else {"-1": 16}
    )
    kill_and_replace(settings, Path(f"file://{tmp_path}/bucket/run"), tmp_path, nodes=nodes)


def test_out_and_work_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert place_of(Path("work/run")).work_folder(None) == Path("work/run")
    place = place_of(Path("s3://bucket/run"))
    folder = place.work_folder(None)
    assert place.name == "s3://bucket/run" and folder.parent == tmp_path / "terakoya/runs"
    assert folder.name.startswith("run-") and folder != place_of("s3://other/run").work_folder(None)
    assert place.work_folder("here") == Path("here")
    with pytest.raises(UserError, match="expected an address such as s3://bucket/run in --out, got work/run"):
        place_of("work/run").work_folder("here")
    with pytest.raises(UserError, match="expected a work folder of this machine, got an address"):
        place.work_folder("s3://bucket/work")


def test_ranks_that_wait_for_a_long_fetch_meet_meanwhile(memory: ObjectFolder, tmp_path: Path) -> None:
    """No rank waits in one exchange for as long as the fetch takes."""
    met: list[bool] = []
    mirror = Mirror(memory, tmp_path, keep=1)

    class Context:
        is_main = True

        def broadcast(self, value: bool) -> bool:
            met.append(value)
            return value

        def run_on_main(self, action: str, work: Callable[[], Any]) -> Any:
            return work()

    def fetch() -> Mirror:
        wait_for(lambda: len(met) > 5)
        mirror.take_over()
        return mirror

    context = cast(DistributedContext, Context())
    assert keeping._run_while_others_wait(context, memory.address, fetch) is mirror
    assert met[-1] and not any(met[:5])


def test_threads_of_a_mirror_are_not_left(memory: ObjectFolder, tmp_path: Path) -> None:
    send_all(memory, tmp_path)
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("terakoya-mirror")])


# ------------------------------------------------------------------------------------------- stores at an address


@pytest.mark.slow
def test_a_run_reads_its_stores_from_an_address(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    for file in store.rglob("*"):
        if file.is_file():
            system.pipe(f"/data/{file.relative_to(store)}", file.read_bytes())
    try:
        settings = toy.parameters(store, max_steps=4, checkpoint={"save_steps": 2})
        settings["data"]["split"] = [9, 1]
        settings["evaluation"] = {"steps": 2, "batches": 1}
        there = {**settings, "data": {**settings["data"], "train": ["memory://data"]}}
        train(settings, tmp_path / "here")
        train({**there, "max_steps": 3}, tmp_path / "there")
        train(there, tmp_path / "there", allow_change=["max_steps"])
    finally:
        system.rm("/data", recursive=True)
    assert toy.losses(tmp_path / "there") == toy.losses(tmp_path / "here")
    manifest = json.loads((tmp_path / "there/checkpoints/step-00000004/manifest.json").read_bytes())
    assert manifest["parameters"]["data"]["train"][0]["store"] == "memory://data"
    assert "memory://data" in manifest["stores"] and manifest["positions"][0]["store"] == "memory://data"
    assert "memory://data (validation)" in manifest["stores"]


def test_a_run_that_could_not_be_sent_belongs_to_no_address(memory: ObjectFolder, tmp_path: Path) -> None:
    def refuse(self: ObjectFolder, name: str, content: bytes) -> None:
        raise FileNotFoundError(name)

    write_checkpoint(tmp_path / "run", 2)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="found no such bucket"):
        patch.setattr(ObjectFolder, "write", refuse)
        keeping.send_run(tmp_path / "run", "memory://bucke/run", keep=1)
    keeping.send_run(tmp_path / "run", memory.address, keep=1)
    assert whole_steps(memory) == [2]
