"""The events of a run, typed: their listeners are called, and a listener that fails is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya import components
from terakoya.components import EventListener
from terakoya.errors import UserError, nearest
from terakoya.plugins.discovery import PluginError, describe

if TYPE_CHECKING:
    from terakoya.components.run import Run, StepReport

EVENTS = ("run_started", "step_finished", "evaluate", "validation_finished", "checkpoint_saved", "run_finished")

Listeners = tuple[tuple[str, Callable[..., Any]], ...]
"""For each plugin that implements a hook: its name, and a function that calls its implementation only."""


class Events:
    """The events of `hookspecs`, typed. An exception in a listener becomes a PluginError that names the plugin."""

    def __init__(self, listeners: Mapping[str, Listeners]) -> None:
        self.listeners = listeners
        self._step_finished = listeners["step_finished"]  # in the loop: no look-up

    def join(self, listeners: Mapping[str, EventListener]) -> Events:
        """Returns events that also call `listeners`, by name: those of a run's event plugins with settings."""
        joined = {event: [*each] for event, each in self.listeners.items()}
        for name, listener in listeners.items():
            for event in EVENTS:
                if getattr(type(listener), event) is not getattr(EventListener, event):
                    joined[event].append((name, _as_hook(getattr(listener, event))))
        return Events({event: tuple(each) for event, each in joined.items()})

    def with_functions(self, functions: Mapping[str, Callable[..., Any]]) -> Events:
        """Returns events that also call plain `functions`, by event: `{"step_finished": f}` calls `f(run, report)`.
        Raises UserError if there is no such event, or a function does not take the arguments of its event."""
        joined = dict(self.listeners)
        for event, function in functions.items():
            if event not in EVENTS:
                raise UserError(f"events: there is no event {event}{nearest(event, EVENTS)}")
            names = list(inspect.signature(getattr(Events, event)).parameters)[1:]
            name = getattr(function, "__qualname__", repr(function))
            try:
                inspect.signature(function).bind(*names)
            except (TypeError, ValueError):
                raise UserError(f"events.{event}: expected a function of ({', '.join(names)}), got {name}") from None
            joined[event] = (*joined[event], (name, _as_hook(function, positional=True)))
        return Events(joined)

    def run_started(self, run: Run) -> None:
        call(self.listeners["run_started"], run=run)

    def step_finished(self, run: Run, report: StepReport) -> None:
        if self._step_finished:
            call(self._step_finished, run=run, report=report)

    def evaluate(self, run: Run) -> dict[str, float]:
        """Returns the numbers of all listeners; see `hookspecs.evaluate`. Raises UserError if two return the same
        name."""
        numbers: dict[str, float] = {}
        owner: dict[str, str] = {}
        for plugin, results in call(self.listeners["evaluate"], run=run):
            for result in results:
                if not isinstance(result, Mapping):
                    raise PluginError(plugin, f"evaluate: expected a mapping of name to number, got {result!r}")
            for name, number in (item for result in results for item in result.items()):
                if name in owner:
                    raise UserError(f'evaluate: "{name}" is returned twice, by {owner[name]} and by {plugin}')
                numbers[name], owner[name] = number, plugin
        return numbers

    def validation_finished(self, run: Run, values: components.Validations) -> None:
        call(self.listeners["validation_finished"], run=run, values=values)

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        call(self.listeners["checkpoint_saved"], run=run, folder=folder)

    def run_finished(self, run: Run, error: BaseException | None) -> None:
        """See `hookspecs.run_finished`. A listener that fails keeps none of the others from being called."""
        failed: PluginError | None = None
        for each in self.listeners["run_finished"]:
            try:
                call((each,), run=run, error=error)
            except PluginError as raised:
                failed = failed or raised
        if failed is not None:
            raise failed


def _as_hook(method: Callable[..., Any], *, positional: bool = False) -> Callable[..., list[Any]]:
    """Returns a function that calls `method` and returns a list, as the caller of a hook does. With `positional` the
    names of its arguments are free."""

    def listener(**arguments: Any) -> list[Any]:
        result = method(*arguments.values()) if positional else method(**arguments)
        return [] if result is None else [result]

    return listener


def call(listeners: Listeners, **arguments: Any) -> list[tuple[str, Any]]:
    """Calls every listener; returns a list of (plugin, its results)."""
    results = []
    for plugin, listener in listeners:
        try:
            results.append((plugin, listener(**arguments)))
        except Exception as error:
            raise PluginError(plugin, describe(error)) from error
    return results
