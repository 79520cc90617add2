"""The event plugins of a run, on one rank: called, restored, and what they request and raise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terakoya.plugins import PluginError, registry
from terakoya.runs.checkpoints import reading
from terakoya.training.checkpoint import event_tensors
from terakoya.training.checkpoint.event_tensors import EventTensors
from terakoya.training.model.compilation import run_uncompiled
from terakoya.training.run import Run


class PluginEvents:
    """Calls the event plugins of `run`.

    Attributes:
        listeners: by name: those of plugins with settings, and those that every run has.
        error: what a plugin raised in an event on this rank and the other ranks do not know yet.
        save_due: whether a plugin has requested a checkpoint of the step under way.
    """

    def __init__(self, run: Run, *, compiled: bool) -> None:
        self.listeners = registry().start_listeners(run)
        self.error: PluginError | None = None
        self.save_due = False
        self._run, self._compiled = run, compiled
        self._events = registry().hook.join(self.listeners)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the event `name`; ranks exchange the error that a plugin raises before the next step. A plugin may run
        the model with any shapes, so it runs uncompiled there."""
        try:
            with run_uncompiled(self._compiled):
                return getattr(self._events, name)(*arguments)
        except PluginError as error:
            self.error = error
            return None

    def finish(self, error: BaseException | None) -> None:
        """Calls the last event, after the run has ended by `error` or without one. Raises PluginError."""
        self._events.run_finished(self._run, error)

    def raise_error(self) -> None:
        """Raises on all ranks what an event raised on any of them, if one did; collective."""
        self._run.context.raise_on_all_ranks("an event plugin", self.error)

    def requests(self) -> list[int]:
        """Returns whether plugins on this rank have requested a checkpoint, and the end of the run: 0 or 1 each."""
        return [int(self._run.save_requested), int(self._run.end_requested is not None)]

    def take(self, save: bool, end: bool) -> None:
        """Notes what plugins of any rank have requested, on all ranks alike."""
        run = self._run
        if save:
            self.save_due, run.save_requested = True, False
        if end:
            run.ended_by = run.end_requested or "an event plugin of another process"

    def meet(self) -> None:
        """Takes at once what plugins of any rank have requested; collective."""
        saves, ends = self._run.context.sum_counts(self.requests())
        self.take(bool(saves), bool(ends))

    def state(self) -> dict[str, Any]:
        """Returns the state of each plugin that has one, as JSON values."""
        return {name: state for name, each in self.listeners.items() if (state := each.state()) is not None}

    def tensors(self) -> EventTensors:
        """Returns what plugins keep in tensors, on this rank."""
        return event_tensors.collect(self.listeners, self._run.rank)

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Gives plugins their `state` and their tensors of the checkpoint `folder`; says which have none there."""
        for name, own in state.items():
            if name in self.listeners:
                self.listeners[name].load(own)
        saved = event_tensors.plugins_in(folder)
        for name in saved:
            if name not in self.listeners:
                self._run.warn(f"events.{name} is off: what it kept in {folder.name} ends there")
        for name, listener in self.listeners.items():
            if name in saved:
                with reading(folder):
                    listener.load_tensors(event_tensors.SavedEventTensors(folder, name))
            elif event_tensors.keeps_tensors(listener):
                self._run.warn(f"events.{name}: {folder.name} holds nothing of it, so it begins anew")
