"""Writes TensorBoard event files under RUN/tensorboard; view them with `tensorboard --logdir RUN`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terakoya import hookimpl
from terakoya.components import Tracker, TrackerRun


class TensorBoard(Tracker):
    """Writes metrics as scalars, and the parameters as text."""

    flush_seconds: int = 30
    """The time from one write to disk to the next. Unit: seconds."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens a new event file; TensorBoard merges it with the files of earlier starts. Of steps that come again the
        later values stand."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run_folder / "tensorboard"), flush_secs=self.flush_seconds)
        text = json.dumps(parameters, indent=2, ensure_ascii=False)
        writer.add_text("parameters", "    " + text.replace("\n", "\n    "))
        return _TensorBoardRun(writer)


class _TensorBoardRun:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def begin(self, step: int, attempt: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # TensorBoard then drops what it has of this step and of later ones.
        self.writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all values takes a quarter of the time of one `add_scalar` per value.
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=scalars), step)

    def log_text(self, step: int, name: str, text: str) -> None:
        # indented: TensorBoard reads Markdown, in which a sample must not become a heading or a link
        self.writer.add_text(name, "    " + text.replace("\n", "\n    "), step)

    def close(self) -> None:
        self.writer.close()


@hookimpl
def register_trackers() -> dict[str, type[Tracker]]:
    return {"tensorboard": TensorBoard}
