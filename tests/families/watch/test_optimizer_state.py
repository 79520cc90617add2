"""Norms of the optimizer's state in the log; those of several processes: `engine_runs.assert_norms_alike`."""

import math
from pathlib import Path

import toy

from terakoya.config.parameters import Parameters
from terakoya.training.setup import train_in_this_process


def test_norms_are_those_of_the_checkpoint_by_group_and_change_nothing(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(
        store, max_steps=4, logging_steps=2, checkpoint={"save_steps": 4}, trackers=[{"type": "tensorboard"}],
        optimizer={"type": "muon", "learning_rate": 0.02, "adamw_learning_rate": 0.001},
    )  # fmt: skip
    train_in_this_process(Parameters.from_dict(settings, source="plain"), tmp_path / "plain")
    logged = Parameters.from_dict({**settings, "events": {"optimizer_state": {}}}, source="logged")
    train_in_this_process(logged, tmp_path / "run")
    assert toy.losses(tmp_path / "run") == toy.losses(tmp_path / "plain")

    records = toy.records(tmp_path / "run", "optimizer_state")
    assert sorted(records) == [1, 2, 4]
    state = toy.saved(tmp_path / "run/checkpoints/step-00000004", "optimizer")
    weights = toy.saved(tmp_path / "run/checkpoints/step-00000004")
    squares = {"weight": sum(float((value.double() ** 2).sum()) for value in weights.values())}
    for name, value in state.items():
        kind = name.rpartition("/")[2]
        if kind == "step":
            continue
        # Muon's matrices are group 0; AdamW decays other matrices (2), and not norms and biases (1)
        group = 0 if kind == "momentum_buffer" else 2 if value.ndim > 1 else 1
        for key in (kind, f"{kind}/group{group}"):
            squares[key] = squares.get(key, 0.0) + float((value.double() ** 2).sum())
    kinds = {key.partition("/")[0] for key in squares}
    got = {key: value for key, value in records[4].items() if key.partition("/")[0] in kinds}
    assert got.keys() == squares.keys() and "momentum_buffer/group0" in got
    assert all(math.isclose(got[key], math.sqrt(square), rel_tol=1e-12) for key, square in squares.items())

    (named,) = toy.records(tmp_path / "run", "optimizer_groups").values()
    assert ["momentum " in each for each in named["groups"]] == [True, False, False]
    assert ["weight_decay 0.0" in each for each in named["groups"]] == [False, True, False]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert math.isclose(events.Scalars("optimizer/exp_avg")[-1].value, got["exp_avg"], rel_tol=1e-6)
