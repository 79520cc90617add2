"""A spike of the loss that lasts makes a run go back and pass over its steps, however often it is killed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import faults
import pytest
import toy
from killed_here import Killed, train
from saved_weights import FAULTS, same_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from terakoya.errors import Diverged
from terakoya.runs import status
from terakoya.runs.checkpoints import list_checkpoints, read_manifest
from terakoya.training import rollback

LAST, ROLLBACK = 13, {"action": "rollback"}
SPIKE, SKIPPED = (6, 8), [5, 8]


def spoil(run: Any) -> None:
    faults.spoil(run, range(SPIKE[0], SPIKE[1] + 1), factor=20.0)


def settings(store: Path, **changes: Any) -> dict[str, Any]:
    keys = {"max_steps": LAST, "logging_steps": 2, "checkpoint": {"save_steps": 3, "keep": 2}, "spikes": ROLLBACK}
    return toy.parameters(store, **{**keys, **changes})


def end(out: Path) -> tuple[Any, ...]:
    """What a run has come to: the logged steps after the spike, and what the last manifest says of its steps."""
    manifest = json.loads((out / f"checkpoints/step-{LAST:08d}/manifest.json").read_text())
    kept = {step: values for step, values in toy.losses(out).items() if not SKIPPED[0] <= step <= SKIPPED[1]}
    return kept, manifest["step_health"], manifest["rollbacks"], manifest["consumed_tokens"], manifest["meters"]


@pytest.fixture(scope="module")
def back(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that goes back, and the number of its updates."""
    out = tmp_path_factory.mktemp("back") / "run"
    return out, train(settings(store, trackers=[{"type": "tensorboard"}]), out, spoil)


@pytest.mark.slow
def test_a_run_that_goes_back_is_the_run_that_passes_over_these_steps(
    back: tuple[Path, int], store: Path, tmp_path: Path
) -> None:
    run, _ = back
    shown = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("train/loss")
    assert [each.step for each in shown] == [1, 2, 4, 10, 12, 13], "nothing of what was undone"
    by_hand = settings(store, spikes=None)
    by_hand["data"]["skip_steps"] = [SKIPPED]
    train(by_hand, tmp_path / "by_hand", spoil)
    assert same_weights(run, tmp_path / "by_hand", LAST)
    assert end(run)[0] == end(tmp_path / "by_hand")[0]
    ((step, record),) = toy.records(run, "rollback").items()
    assert (step, record["back_to"], record["first_skipped"], record["spike"]) == (8, 3, 5, 6)
    assert record["rows"] == [4 * 16, 8 * 16] and str(store) in record["text"] and record["number"] == 1
    (kept,) = end(run)[2]
    assert [kept["first"], kept["last"]] == SKIPPED
    seen = status.read(run)
    assert seen.rollbacks == 1 and "went back to step 3" in (seen.last_rollback or "")


@pytest.mark.slow
def test_nothing_of_what_was_undone_is_kept_for_ever(store: Path, tmp_path: Path) -> None:
    often = {"save_steps": 1, "keep": 20}
    chosen = settings(store, checkpoint=often, events={"permanent_checkpoints": {"every": 1}})
    train(chosen, tmp_path / "run", spoil)
    kept = [step for step, _ in list_checkpoints(tmp_path / "run" / "permanent")]
    assert kept == [step for step in range(LAST + 1) if not SKIPPED[0] <= step <= SKIPPED[1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill", [10, *(pytest.param(step, marks=pytest.mark.nightly) for step in (7, 8, 9, 11, 12, 14))]
)
def test_a_kill_at_any_moment_leads_to_the_same_run(
    kill: int, back: tuple[Path, int], store: Path, tmp_path: Path
) -> None:
    """Within an update in the spike, the last one before going back, the first after it, and later ones."""
    run, updates = back
    assert updates == 9 + 1 + 5, "steps up to 9; then step 4 again, and from 9 on"
    with pytest.raises(Killed):
        train(settings(store), tmp_path / "killed", spoil, kill=kill)
    train(settings(store), tmp_path / "killed", spoil)
    assert end(tmp_path / "killed") == end(run)
    assert same_weights(tmp_path / "killed", run, LAST)


@pytest.mark.nightly
@pytest.mark.parametrize("removed", [0, 1, 3])
def test_a_kill_while_checkpoints_are_removed_leads_to_the_same_run(
    removed: int, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = settings(store, checkpoint={"save_steps": 1, "keep": 2})
    train(often, tmp_path / "run", spoil)
    remove, left = rollback.remove_checkpoint, [removed]

    def die_after_some(folder: Path) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        remove(folder)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(rollback, "remove_checkpoint", die_after_some)
        train(often, tmp_path / "killed", spoil)
    train(often, tmp_path / "killed", spoil)
    assert end(tmp_path / "killed") == end(tmp_path / "run")
    assert same_weights(tmp_path / "killed", tmp_path / "run", LAST)


@pytest.mark.slow
def test_a_spike_in_the_first_steps_goes_back_to_the_beginning(store: Path, tmp_path: Path) -> None:
    def spoil_first(run: Any) -> None:
        faults.spoil(run, range(2, 5), factor=20.0)

    first = settings(store, max_steps=8, checkpoint={"save_steps": 100})
    train(first, tmp_path / "run", spoil_first)
    by_hand = {**first, "spikes": None, "data": {**first["data"], "skip_steps": [[1, 4]]}}
    train(by_hand, tmp_path / "by_hand", spoil_first)
    assert same_weights(tmp_path / "run", tmp_path / "by_hand", 8)


@pytest.mark.nightly
def test_a_run_goes_back_so_often_and_ends_then_with_exit_code_3(store: Path, tmp_path: Path) -> None:
    """Whatever it passes over, the loss is high again; the same command ends in the same way, and keeps checkpoints."""

    def never_ends(run: Any) -> None:
        faults.spoil(run, range(6, LAST + 1), factor=20.0)

    bounded = settings(store, spikes={**ROLLBACK, "max_rollbacks": 2, "lasting_steps": 2})
    for _ in range(2):
        with pytest.raises(Diverged, match=r"gone back 2 times, and spikes.max_rollbacks is 2") as error:
            train(bounded, tmp_path / "run", never_ends)
        assert error.value.exit_code == 3 and str(store) in str(error.value)
    assert {record["number"] for record in toy.records(tmp_path / "run", "rollback").values()} == {1, 2}


@pytest.mark.slow
def test_a_checkpoint_knows_how_far_its_run_may_go_back(store: Path, tmp_path: Path) -> None:
    """In a spike to before it, else to before the steps whose losses are not judged yet."""
    with pytest.raises(Killed):
        train(settings(store, checkpoint={"save_steps": 1, "keep": 9}), tmp_path / "run", spoil, kill=8)
    found = list_checkpoints(tmp_path / "run/checkpoints")
    back_to = {step: read_manifest(folder)["keep_before"] for step, folder in found}
    assert max(back_to) == 7 and back_to[7] == SKIPPED[0] - 1 and all(back_to[step] < step for step in back_to)


@pytest.mark.slow
def test_without_an_older_checkpoint_nothing_is_removed(store: Path, tmp_path: Path) -> None:
    """As after a run whose `spikes` are changed when it is resumed at the spike."""
    with pytest.raises(Killed):
        train(settings(store, spikes={}, checkpoint={"save_steps": 6}), tmp_path / "run", spoil, kill=7)
    with pytest.raises(Diverged, match="no checkpoint from before step 5 is whole"):
        train(settings(store), tmp_path / "run", spoil)
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()


def go_back_on_two_ranks(
    store: Path,
    tmp_path: Path,
    environment: Mapping[str, str],
    *,
    kills: tuple[str, ...] = ("7", "9@2"),
    **changes: Any,
) -> None:
    """Runs that go back, one of which is killed, and with several `kills` one that passes over these steps by hand."""
    spoiled = {"FAULT": f"spoil:{SPIKE[0]}-{SPIKE[1]}", "FACTOR": "40", "FAULT_RANK": "1", **environment}
    chosen, out = settings(store, batch_size={"0": 16}, **changes), tmp_path / "run"
    toy.train(chosen, out, nodes=(2,), plugins=FAULTS, environment=spoiled)
    (record,) = toy.records(out, "rollback").values()
    assert [record["first_skipped"], record["step"]] == SKIPPED
    if len(kills) > 1:
        by_hand = {**chosen, "spikes": None, "data": {**chosen["data"], "skip_steps": [SKIPPED]}}
        toy.train(by_hand, tmp_path / "by_hand", nodes=(2,), plugins=FAULTS, environment=spoiled)
        assert same_weights(out, tmp_path / "by_hand", LAST)
        assert end(out)[0] == end(tmp_path / "by_hand")[0]
    cut = tmp_path / "cut"
    for kill in kills:
        killed = {**spoiled, "FAULT_KILL": kill}
        toy.train(chosen, cut, plugins=FAULTS, nodes=(2,), environment=killed, code=None)
        assert not (cut / f"checkpoints/step-{LAST:08d}").exists()
    toy.train(chosen, cut, nodes=(2,), plugins=FAULTS, environment=spoiled)
    assert end(cut) == end(out)
    assert same_weights(cut, out, LAST)


@pytest.mark.nightly
def test_two_ranks_go_back_together(store: Path, tmp_path: Path) -> None:
    """The loss of one of them is the spike; saves run in the background."""
    go_back_on_two_ranks(
        store, tmp_path, {}, kills=("9@2",), checkpoint={"save_steps": 3, "keep": 2, "async_save": True}
    )


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"engine": "fsdp"},
    **{f"zero {stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "tensor": {"tp_size": 2},
    "sequence": {"sp_size": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_goes_back_alike(engine: str, precision: str, store: Path, tmp_path: Path) -> None:
    scaling = {"init_scale": 16.0} if precision == "fp16" else None  # low enough that the spike does not overflow
    go_back_on_two_ranks(
        store, tmp_path, {"FAULT_RANK": "-1"}, parallel=ENGINES[engine], precision=precision, loss_scaling=scaling
    )
