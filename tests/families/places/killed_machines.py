"""A run at an address whose machine is killed, and a bare machine that continues it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import toy

from terakoya.places import as_written
from terakoya_places import run_objects
from terakoya_places.object_folder import ObjectFolder


def kill_and_replace(
    settings: Mapping[str, Any],
    address: Path,
    folder: Path,
    *,
    nodes: tuple[int, ...] = (1,),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Trains to `address` in processes that get SIGKILL once a checkpoint is there, and then on another machine, with
    nothing but the address. Fails unless weights, optimizer and losses are those of a run that nobody disturbs."""
    bucket = ObjectFolder(as_written(address))
    started = toy.start(
        settings, address, "--work-folder", str(folder / "spot"), folder=folder, nodes=nodes, environment=environment
    )
    deadline = time.monotonic() + 60
    try:
        while not whole_steps(bucket):
            assert time.monotonic() < deadline, started[0].output.read_text()
            time.sleep(0.005)
        assert all(each.running() for each in started)
    finally:
        for each in started:
            each.process.kill()
            each.process.join()
    assert started[0].process.exitcode == -signal.SIGKILL
    steps, last = whole_steps(bucket), settings["max_steps"]
    assert steps and steps[-1] < last
    (folder / "spot").rename(folder / "gone")

    bare = toy.start(
        settings, address, "--work-folder", str(folder / "bare"), folder=folder, nodes=nodes, environment=environment
    )
    printed = toy.finish(bare)
    assert f"fetched step-{steps[-1]:08d}, from which the run continues" in " ".join(printed.split())
    toy.train(settings, folder / "alone", nodes=nodes)
    there = run_objects.fetch_newest(bucket, folder / "there", bucket.sizes())[0]
    alone = folder / f"alone/checkpoints/step-{last:08d}"
    assert there is not None and there.name == alone.name
    for kind in ("model", "optimizer"):
        tensors, expected = toy.saved(there, kind), toy.saved(alone, kind)
        assert tensors.keys() == expected.keys()
        assert all(bool((tensors[name] == expected[name]).all()) for name in expected)
    after = {step: values for step, values in toy.losses(folder / "alone").items() if step > steps[-1]}
    losses = toy.losses(folder / "there")
    assert {step: losses[step] for step in after} == after


def whole_steps(store: ObjectFolder) -> list[int]:
    """Returns the steps of the checkpoints in the store that have their manifest."""
    return list(run_objects.checkpoint_steps(run_objects.find_committed(store.sizes())))
