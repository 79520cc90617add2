"""Two processes that write checkpoints together, in the foreground and in the background: killed, stopped, on a full
disk, and resumed by other numbers of processes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from saved_weights import FAULTS

TWO = (1, 1)
STEPS = (2, 4, 6)


def settings(store: Path, *, background: bool, **changes: Any) -> dict[str, Any]:
    checkpoint = {"save_steps": 2, "keep": 5, "async_save": background}
    rows = {"0": 9, "1": 7}
    return {**toy.parameters(store, batch_size=rows, max_steps=6, checkpoint=checkpoint), **changes}


def folder(out: Path, step: int) -> Path:
    return out / f"checkpoints/step-{step:08d}"


@pytest.fixture(scope="module")
def straight(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes without faults, which waits for its checkpoints."""
    out = tmp_path_factory.mktemp("straight") / "run"
    toy.train(settings(store, background=False), out, nodes=TWO, plugins=FAULTS)
    return out


def assert_same(out: Path, straight: Path, step: int = STEPS[-1]) -> None:
    """Losses and the whole state are bit-identical."""
    assert toy.losses(out) == toy.losses(straight)
    for kind in ("model", "optimizer"):
        mine, theirs = toy.saved(folder(out, step), kind), toy.saved(folder(straight, step), kind)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_each_process_writes_about_half(straight: Path) -> None:
    last = folder(straight, 6)
    manifest = json.loads((last / "manifest.json").read_text())
    state = [name for name in manifest["files"] if name.startswith("state/")]
    assert sorted(state) == [
        f"state/{kind}-0000{rank}.safetensors" for kind in ("model", "optimizer") for rank in (0, 1)
    ]
    assert {path.relative_to(last).as_posix() for path in last.rglob("*") if path.is_file()} == {
        "manifest.json",
        *manifest["files"],
    }
    whole = sum(value.nbytes for value in toy.saved(last, "optimizer").values())
    largest = max(value.nbytes for value in toy.saved(last, "optimizer").values())
    for rank in (0, 1):
        content = (last / f"state/optimizer-0000{rank}.safetensors").read_bytes()
        written = len(content) - 8 - int.from_bytes(content[:8], "little")
        assert abs(written - whole / 2) <= largest


@pytest.mark.slow
def test_a_background_save_writes_the_same_bytes(store: Path, straight: Path, tmp_path: Path) -> None:
    toy.train(settings(store, background=True), tmp_path / "run", nodes=TWO, plugins=FAULTS)
    assert_same(tmp_path / "run", straight)
    for step in STEPS:
        one, two = folder(straight, step), folder(tmp_path / "run", step)
        files = json.loads((one / "manifest.json").read_text())["files"]
        assert json.loads((two / "manifest.json").read_text())["files"] == files
        assert "model/model.safetensors" in files
    saved = toy.records(tmp_path / "run", "checkpoint")
    assert sorted(saved) == list(STEPS) and all(each["folder"] == f"step-{step:08d}" for step, each in saved.items())
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


QUICK = [(True, 0, "manifest@2")]
SLOW = [
    *((False, 1, instant) for instant in ("write@3", "write@4", "fsync@3", "fsync@4")),
    *((False, 0, instant) for instant in ("write@3", "fsync@13", "manifest@2", "rename@2")),
    *((True, 1, instant) for instant in ("write@3", "write@4", "fsync@3", "fsync@4")),
    *((True, 0, instant) for instant in ("write@3", "write@4", "fsync@13", "fsync@18", "fsync@20", "rename@2")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("background", "rank", "instant"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.nightly) for each in SLOW)]
)
def test_a_run_killed_inside_its_second_save_resumes_from_the_first(
    background: bool, rank: int, instant: str, store: Path, straight: Path, tmp_path: Path
) -> None:
    raw = settings(store, background=background)
    environment = {"FAULT": f"save:{instant}", "FAULT_RANK": str(rank)}
    started = toy.start(raw, tmp_path / "run", nodes=TWO, plugins=FAULTS, environment=environment)
    toy.finish(started, code=None)
    codes = [each.process.exitcode for each in started]
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] not in (0, -signal.SIGKILL)
    assert not folder(tmp_path / "run", 4).exists()
    output = toy.train(raw, tmp_path / "run", nodes=TWO, plugins=FAULTS)
    assert "at step 2" in output and "removed .staging-step-00000004, left by an interrupted save" in output
    assert_same(tmp_path / "run", straight)
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_save_that_one_rank_has_no_space_for_is_reported_and_the_run_goes_on(
    background: bool, store: Path, straight: Path, tmp_path: Path
) -> None:
    """All ranks agree on it; where the save runs in the background, they notice the error at the next step."""
    environment = {"FAULT": "full:write@3", "FAULT_RANK": "1"}
    output = toy.train(
        settings(store, background=background), tmp_path / "run", nodes=TWO, plugins=FAULTS, environment=environment
    )
    warning = "step 4 could not be saved (1 of 3 failed saves in a row that end a run): saving"
    assert warning in output and "failed on 1 of 2 processes; rank 1 on" in output and "Traceback" not in output
    assert "OSError: [Errno 28] No space left on device; step 2 is safe, and the next save tries again" in output
    assert sorted(toy.records(tmp_path / "run", "checkpoint")) == [2, 6]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000002", "step-00000006"]
    assert_same(tmp_path / "run", straight)


@pytest.mark.nightly
def test_a_run_ends_when_three_saves_in_a_row_found_no_space(store: Path, straight: Path, tmp_path: Path) -> None:
    environment = {"FAULT": "full:write@3-", "FAULT_RANK": "1"}
    every_step = settings(store, background=True, checkpoint={"save_steps": 1, "keep": 5, "async_save": True})
    output = toy.train(every_step, tmp_path / "run", nodes=TWO, plugins=FAULTS, environment=environment, code=74)
    assert "Traceback" not in output and "2 of 3 failed saves in a row" in output
    assert "3 saves in a row failed: saving" in output
    assert "; step 1 is safe; free some space and give the same command again" in output.replace("\n", " ")
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]
    toy.train(every_step, tmp_path / "run", nodes=TWO, plugins=FAULTS)
    assert_same(tmp_path / "run", straight)


@pytest.mark.slow
def test_a_stop_request_waits_for_the_background_save(store: Path, straight: Path, tmp_path: Path) -> None:
    environment = {"FAULT": "term:2", "FAULT_RANK": "1"}  # rank 0 receives the request in step 3
    toy.train(
        settings(store, background=True), tmp_path / "run", nodes=TWO, plugins=FAULTS, environment=environment, code=75
    )
    assert sorted(toy.records(tmp_path / "run", "checkpoint")) == [2, 3]
    assert (folder(tmp_path / "run", 3) / "manifest.json").is_file()
    stopped = toy.losses(tmp_path / "run")
    assert sorted(stopped) == [1, 2, 3] and stopped.items() <= toy.losses(straight).items()


@pytest.mark.nightly
def test_a_stop_request_during_the_save_of_an_earlier_request_does_not_interrupt_it(
    store: Path, tmp_path: Path
) -> None:
    """As with ssh, which sends the request to one host after another."""
    environment = {"FAULT": "late:3", "FAULT_RANK": "0"}
    no_other_save = settings(store, background=False, checkpoint={"save_steps": 100})
    toy.train(no_other_save, tmp_path / "run", nodes=TWO, plugins=FAULTS, environment=environment, code=75)
    (step,) = toy.records(tmp_path / "run", "stopped")
    assert step in (3, 4) and (folder(tmp_path / "run", step) / "manifest.json").is_file()


@pytest.mark.slow
def test_two_processes_then_one_then_three(store: Path, tmp_path: Path) -> None:
    """Each number of processes reads the shards that the one before has written."""
    base = settings(store, background=True, schedule={"type": "constant"})
    base["architecture"] = toy.without_dropout(base["architecture"])
    toy.train({**base, "batch_size": {"-1": 16}}, tmp_path / "straight")
    for steps, rows in ((2, {"0": 9, "1": 7}), (4, {"-1": 16}), (6, {"0": 6, "1": 5, "2": 5})):
        toy.train({**base, "max_steps": steps, "batch_size": rows}, tmp_path / "moved", nodes=(1,) * len(rows))
        assert len(list((folder(tmp_path / "moved", steps) / "state").glob("model-*"))) == len(rows)
    straight, moved = toy.losses(tmp_path / "straight"), toy.losses(tmp_path / "moved")
    assert sorted(moved) == sorted(straight) == [1, 2, 3, 4, 5, 6]
    assert all(abs(moved[step][0] - straight[step][0]) < 1e-5 for step in straight)
    assert sorted(toy.records(tmp_path / "moved", "resume")) == [2, 4]
