"""The main guarantees: neither topology nor stopping changes the training. Real processes, real kills."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import toy
from killed_runs import kill_and_resume
from saved_weights import FAULTS, relative_error, same_weights, weights
from selection import at_night


@pytest.mark.slow
@pytest.mark.parametrize("precision", at_night(("fp32", "bf16"), always=("fp32",)))
def test_seven_five_four_on_three_nodes_is_sixteen_on_one(precision: str, store: Path, tmp_path: Path) -> None:
    """Uneven nodes, an unequal number of micro-steps: the gradients of one big batch."""
    settings = toy.parameters(store, max_steps=3, precision=precision, micro_batch_size=3)
    settings["architecture"] = toy.without_dropout(settings["architecture"])
    # almost plain gradient descent: with eps 1 the update is nearly proportional to the gradient
    settings["optimizer"] = {"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.0}
    toy.train({**settings, "batch_size": {"-1": 16}}, tmp_path / "one")
    output = toy.train({**settings, "batch_size": {"0": 7, "1": 5, "2": 4}}, tmp_path / "three", nodes=(1, 1, 1))
    assert "3 processes on 3 nodes" in output and "3 micro-steps of 3" in output
    one, three = toy.losses(tmp_path / "one"), toy.losses(tmp_path / "three")
    assert one.keys() == three.keys() == {1, 2, 3}
    tolerance = 1e-6 if precision == "fp32" else 1e-2
    for step in one:
        for mine, theirs in zip(one[step], three[step], strict=True):
            assert abs(mine - theirs) <= tolerance * abs(mine), (step, one[step], three[step])
    assert relative_error(weights(tmp_path / "one", 3), weights(tmp_path / "three", 3)) < tolerance


@pytest.mark.nightly
def test_several_processes_a_node_and_a_table_that_does_not_divide(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=2, micro_batch_size=2)
    settings["architecture"] = toy.without_dropout(settings["architecture"])
    toy.train({**settings, "batch_size": {"-1": 10}}, tmp_path / "one")
    toy.train({**settings, "batch_size": {"0": 7, "1": 3}}, tmp_path / "three", nodes=(2, 1))
    one, three = toy.losses(tmp_path / "one"), toy.losses(tmp_path / "three")
    for step in one:
        for mine, theirs in zip(one[step], three[step], strict=True):
            assert abs(mine - theirs) <= 1e-5 * abs(mine)


@pytest.mark.slow
@pytest.mark.parametrize("processes", at_night((1, 2, 3), always=(2,)))
def test_killed_and_resumed_is_bit_identical(
    processes: int, store: Path, validation_store: Path, tmp_path: Path
) -> None:
    """Kill -9 right after a step; the checkpoint is in the middle of a logging interval, too."""
    table = {str(node): rows for node, rows in enumerate([7, 5, 4][:processes])} if processes > 1 else {"-1": 16}
    settings = toy.parameters(store, validation_store, batch_size=table, logging_steps=3)
    kill_and_resume(settings, tmp_path, nodes=(1,) * processes)


SAVES = ["write@3", "fsync@16", "fsync@24", "manifest@2", "rename@2", "prune@3"]


@pytest.fixture(scope="module")
def saved_twice(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that saves every second step and that nothing disturbs, and its parameters."""
    settings = toy.parameters(store, checkpoint={"save_steps": 2, "keep": 2}, max_steps=6)
    straight = tmp_path_factory.mktemp("undisturbed") / "straight"
    toy.train(settings, straight, plugins=FAULTS)
    return straight, settings


@pytest.mark.nightly
@pytest.mark.parametrize("instant", SAVES)
def test_a_run_killed_inside_a_save_resumes_from_the_checkpoint_before(
    instant: str, saved_twice: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    straight, settings = saved_twice
    environment = {"FAULT": f"save:{instant}"}
    toy.train(settings, tmp_path / "cut", plugins=FAULTS, environment=environment, code=-signal.SIGKILL)
    output = toy.train(settings, tmp_path / "cut", plugins=FAULTS)
    assert "resumed from" in output
    assert toy.losses(tmp_path / "cut") == toy.losses(straight)
    assert same_weights(tmp_path / "cut", straight, 6)
    assert not list((tmp_path / "cut/checkpoints").glob(".*"))


@pytest.mark.nightly
def test_a_stop_request_saves_exits_and_resumes(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, batch_size={"0": 9, "1": 7})
    toy.train(settings, tmp_path / "straight", nodes=(1, 1))
    environment = {"FAULT": "term:6", "FAULT_RANK": "1"}  # rank 0 receives the request in step 7
    toy.train(settings, tmp_path / "cut", plugins=FAULTS, nodes=(1, 1), environment=environment, code=75)
    assert (tmp_path / "cut/checkpoints/step-00000007/manifest.json").is_file()
    toy.train(settings, tmp_path / "cut", plugins=FAULTS, nodes=(1, 1))
    assert toy.losses(tmp_path / "cut") == toy.losses(tmp_path / "straight")
    assert same_weights(tmp_path / "cut", tmp_path / "straight", 12)


@pytest.mark.nightly
def test_another_number_of_processes_gives_the_same_rows_and_nearly_the_same_losses(
    store: Path, tmp_path: Path
) -> None:
    settings = toy.parameters(store, max_steps=8, checkpoint={"save_steps": 4})
    settings["architecture"] = toy.without_dropout(settings["architecture"])
    toy.train({**settings, "max_steps": 4, "schedule": {"type": "constant"}}, tmp_path / "moved")
    toy.train({**settings, "schedule": {"type": "constant"}}, tmp_path / "alone")
    output = toy.train(
        {**settings, "schedule": {"type": "constant"}, "batch_size": {"0": 6, "1": 10}},
        tmp_path / "moved",
        nodes=(1, 1),
    )
    assert "resumed from" in output
    moved, alone = toy.losses(tmp_path / "moved"), toy.losses(tmp_path / "alone")
    assert moved.keys() == alone.keys()
    assert all(abs(moved[step][0] - alone[step][0]) < 1e-5 for step in alone)


@pytest.mark.nightly
def test_forty_kills(store: Path, tmp_path: Path) -> None:
    """Killed at 40 random instants, saving at every step: the run always resumes, and ends with the right weights."""
    settings = toy.parameters(
        store, max_steps=1_000_000, schedule={"type": "constant"}, checkpoint={"save_steps": 1, "keep": 2},
        logging_steps=1,
    )  # fmt: skip
    metrics = tmp_path / "cut/metrics.jsonl"
    draw = random.Random(0)
    for kill in range(40):
        (process,) = toy.start(settings, tmp_path / "cut")
        began = time.monotonic()
        size = metrics.stat().st_size if metrics.exists() else 0
        while not metrics.exists() or metrics.stat().st_size == size:
            assert process.running(), f"start {kill} ended by itself"
            assert time.monotonic() - began < 120, f"start {kill} writes nothing"
            time.sleep(0.02)
        time.sleep(draw.random() * 2.5)
        assert process.running(), f"start {kill} ended by itself"
        os.kill(process.pid, signal.SIGKILL)
        process.process.join()
    length = max(toy.records(tmp_path / "cut")) + 3
    interrupted = metrics.read_text().count("left by an interrupted save")
    assert length > 100 and interrupted > 3, "it must run long enough to save, and be killed inside saves"
    settings["max_steps"] = length
    toy.train(settings, tmp_path / "cut")
    toy.train({**settings, "checkpoint": {"save_steps": length}}, tmp_path / "straight")
    assert toy.losses(tmp_path / "cut") == toy.losses(tmp_path / "straight")
    assert same_weights(tmp_path / "cut", tmp_path / "straight", length)
