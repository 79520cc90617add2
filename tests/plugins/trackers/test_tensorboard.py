"""TensorBoard reads the values that were logged."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from terakoya_plugins.trackers.tensorboard import TensorBoard


def test_scalars_and_parameters_are_written(tmp_path: Path) -> None:
    run = TensorBoard().open(tmp_path, {"seed": 42, "optimizer": {"type": "adamw"}})
    run.log(1, {"train/loss": 2.5})
    run.log(3, {"train/loss": 1.5, "validation/wiki/loss": 1.75})
    run.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.5), (3, 1.5)]
    assert [(event.step, event.value) for event in events.Scalars("validation/wiki/loss")] == [(3, 1.75)]
    (text,) = events.Tensors("parameters/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert json.loads("\n".join(line.removeprefix("    ") for line in shown.splitlines())) == {
        "seed": 42,
        "optimizer": {"type": "adamw"},
    }
