"""TensorBoard: what is logged is what TensorBoard's own reader reads."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from terakoya_plugins.trackers.tensorboard import TensorBoard


def test_scalars_and_parameters_are_read_back(tmp_path: Path) -> None:
    run = TensorBoard().open(tmp_path, {"optimizer": {"type": "adamw"}, "note": "東京"})
    run.log(1, {"train/loss": 2.5, "train/learning_rate": 1e-4})
    run.log(20, {"train/loss": 0.25, "validation/loss": float("nan")})
    run.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = {"train/loss", "train/learning_rate", "validation/loss"}
    assert names <= {*events.Tags()["scalars"], *events.Tags()["tensors"]}

    def read(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert read("train/loss") == [(1, 2.5), (20, 0.25)]
    assert read("train/learning_rate") == [(1, pytest.approx(1e-4))]
    text = events.Tensors("parameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"type": "adamw"' in text and "東京" in text
