"""TensorBoard reads the values that were logged."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from terakoya_plugins.trackers.tensorboard import TensorBoard


def test_of_steps_that_come_again_the_later_values_are_shown(tmp_path: Path) -> None:
    for start, losses in ((0, [5.0, 4.0, 9.0, 9.0]), (2, [3.0, 2.0])):  # the second start went back to step 2
        run = TensorBoard().open(tmp_path, {})
        run.begin(start, 1 + (start > 0))
        for step, loss in enumerate(losses, start + 1):
            run.log(step, {"train/loss": loss})
        run.close()
    run = TensorBoard().open(tmp_path, {})
    run.begin(4, 2)
    run.log(5, {"train/loss": 1.0})
    run.close()
    for _ in range(2):
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        found = [(event.step, event.value) for event in events.Scalars("train/loss")]
        assert found == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (5, 1.0)]


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
