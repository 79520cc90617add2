"""The plugins that a run uses, as its checkpoints record them, and what has changed since."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from terakoya.plugins.discovery import GROUP, Plugin
from terakoya.plugins.engines import plugin_engine
from terakoya.plugins.loading import Registry


class RecordCheck(NamedTuple):
    """The differences between the plugins of a record and those of this process, one sentence each."""

    missing: list[str]
    changed: list[str]


def record_plugins(
    registry: Registry, parameters: Mapping[str, Any], transforms: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Returns facts about the plugins that a run with these `parameters` (their JSON) uses, for its checkpoints.

    A run uses the plugins that register its components, its engine and the `transforms` of its module, and those that
    listen to events. `check_plugins` reads this record.
    """
    names, engine = _types(parameters), plugin_engine(parameters.get("parallel") or {})
    used = [f"{each.kind}/{each.name}" for each in registry.components() if each.name in names]
    used += [f"engines/{engine}"] * (engine in registry.engines)
    used += [f"transforms/{name}" for name in registry.transforms if name in transforms]
    used += [f"watches/{key}" for key in _find_watched(registry, parameters)]
    record: list[dict[str, Any]] = []
    for plugin in registry.plugins:
        components = [each for each in used if _plugin_of(registry, *each.split("/", 1)) == plugin.name]
        events = [event for event, listeners in registry.hook.listeners.items() if plugin.name in dict(listeners)]
        if components or events:
            source = plugin.source
            record.append(
                {
                    "name": plugin.name,
                    "distribution": source.distribution,
                    "version": source.version,
                    "sha256": plugin.sha256(),
                    "components": components,
                    "events": events,
                    "requested": source.name if source.requested else None,
                }
            )
    return record


def check_plugins(
    registry: Registry, record: Iterable[Mapping[str, Any]], parameters: Mapping[str, Any], *, events: bool = True
) -> RecordCheck:
    """Returns which plugins of `record` are missing in this process, and which have other code than recorded.

    Only plugins that a run with these `parameters` (their JSON) uses count; with `events` false, only those that
    register its components. A component that another plugin registers now is not missing.
    """
    names, check = _types(parameters), RecordCheck([], [])
    if events:  # a finished model needs no engine
        names |= {plugin_engine(parameters.get("parallel") or {}) or "", *_find_watched(registry, parameters)}
    current = {plugin.name: plugin for plugin in registry.plugins}
    for recorded in record:
        named = [(component, *component.split("/", 1)) for component in recorded["components"]]
        used = [each for each, kind, name in named if name in names or (events and kind == "transforms")]
        listened = events and bool(recorded["events"])
        if not (used or listened):
            continue
        name, version = recorded["distribution"], recorded["version"]
        origin, advice = f"{name} {version}", "" if name == GROUP else f"; install it: pip install {name}=={version}"
        if not name:
            file = recorded.get("requested")  # records of older versions do not have it
            origin = "--plugin"
            advice = f"; load it: terakoya --plugin {shlex.quote(shown_source(file)) if file else 'FILE'} ..."
        which = f"plugin {recorded['name']} ({origin}: {', '.join(used) or 'events only'})"
        plugin = current.get(recorded["name"])
        if plugin is None:
            found = [_plugin_of(registry, *key.split("/", 1)) for key in used]
            others = sorted({name for name in found if name is not None})
            if None in found or listened:
                errors = (f"; {broken.error}" for broken in registry.broken if broken.name == recorded["name"])
                check.missing.append(f"{which} is missing{next(errors, advice)}")
            else:
                check.changed.append(f"{which} is missing; its components come from {', '.join(others)}")
        elif plugin.sha256() != recorded["sha256"]:
            before, after = recorded["version"], plugin.source.version
            check.changed.append(
                f"{which} has changed ({f'{before} -> {after}' if after != before else 'same version'})"
            )
    return check


def _find_watched(registry: Registry, parameters: Mapping[str, Any]) -> list[str]:
    """Returns the keys of `parameters` by which a plugin watches the steps of the run."""
    return [key for key in registry.watches if parameters.get(key) is not None]


def _plugin_of(registry: Registry, kind: str, name: str) -> str | None:
    """The plugin that has the component, engine, transform or watch `name` now."""
    if kind in ("engines", "transforms", "watches"):
        found: Mapping[str, tuple[Any, Plugin]] = getattr(registry, kind)
        return found[name][1].name if name in found else None
    registration = registry.registrations.get((kind, name))
    return None if registration is None else registration.module


def shown_source(requested: str) -> str:
    """Returns the file or module that `--plugin` named, as a record has it: a file below the working directory as its
    path from there."""
    path = Path(requested)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else requested


def _types(settings: Any) -> set[str]:
    """Returns the names of all components in the JSON `settings`: every "type", at any depth."""
    if isinstance(settings, Mapping):
        own = {settings["type"]} if isinstance(settings.get("type"), str) else set()
        if isinstance(settings.get("events"), Mapping):  # an event plugin's name is its key
            own |= {name for name, value in settings["events"].items() if value is not None}
        return own.union(*(_types(value) for value in settings.values()))
    if isinstance(settings, Sequence) and not isinstance(settings, str):
        return set().union(*(_types(value) for value in settings))
    return set()
