"""Loading plugins: every component by kind and name, every event with its listeners.

The core knows no component by name: it asks `registry().component("architectures", "bert")`.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pluggy

from terakoya import hookspecs
from terakoya.components import KINDS, Component
from terakoya.errors import UserError, nearest
from terakoya.hookspecs import Leaving
from terakoya.plugins.discovery import THIRD_PARTY, Broken, Finder, Plugin, PluginError, Source
from terakoya.plugins.events import EVENTS, Events, Listeners, call

logger = logging.getLogger("terakoya")

PLUGINS_VARIABLE = "TERAKOYA_PLUGINS"
WITHOUT_VARIABLE = "TERAKOYA_WITHOUT"
TRACE_VARIABLE = "TERAKOYA_TRACE_PLUGINS"

NOUNS = {kind: f"register_{kind}" for kind in KINDS}


class Offer(NamedTuple):
    """A component and where it came from."""

    kind: str
    name: str
    component: type[Component]
    module: str
    """The plugin's name: its module, or the name of its file."""
    distribution: str
    version: str | None


class LeavingHook(NamedTuple):
    """A plugin that implements a hook which the next release does not have."""

    plugin: str
    source: str
    text: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} ({self.source}): {self.text}"


class RecordCheck(NamedTuple):
    """What differs between the plugins of a record and those of this process, one sentence each."""

    missing: list[str]
    changed: list[str]


@dataclass(frozen=True)
class Registry:
    """The plugins of one process."""

    plugins: Sequence[Plugin]
    offers: Mapping[tuple[str, str], Offer]
    broken: Sequence[Broken]
    blocked: Sequence[str]
    hook: Events
    leaving: Sequence[LeavingHook] = ()

    def component(self, kind: str, name: str) -> type[Any]:
        """The class registered as `name` among `kind` (a key of `components.KINDS`). UserError if there is none."""
        offer = self.offers.get((kind, name))
        if offer is not None:
            return offer.component
        assert kind in KINDS, kind
        offers = {offer.name: offer for offer in self.components() if offer.kind == kind}
        message = f"{kind.removesuffix('s')} {name}: not installed{nearest(name, offers)}"
        by_origin: dict[str, list[str]] = {}
        for offer in offers.values():
            by_origin.setdefault(f"{offer.distribution} {offer.version or ''}".strip(), []).append(offer.name)
        for origin, names in by_origin.items():
            message += f"\n  {origin} offers: {', '.join(names)}"
        for broken in self.broken:
            message += f"\n  could not be loaded and might offer it: {broken}"
        for blocked in self.blocked:
            message += f"\n  left out by --without and might offer it: {blocked}"
        raise UserError(message)

    def names(self, kind: str) -> list[str]:
        """The names registered among `kind`, sorted."""
        return [offer.name for offer in self.components() if offer.kind == kind]

    def name_of(self, kind: str, component: type[Component]) -> str:
        """The name that `component` is registered with among `kind`. UserError if it is not."""
        for offer in self.components():
            if offer.kind == kind and offer.component is component:
                return offer.name
        raise UserError(f"{kind.removesuffix('s')} {component.__name__}: not registered; known: {self.names(kind)}")

    def components(self) -> list[Offer]:
        """Everything registered, by kind and name."""
        kinds = list(KINDS)
        return sorted(self.offers.values(), key=lambda offer: (kinds.index(offer.kind), offer.name))

    def record(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Facts about the plugins that a run with these `parameters` (their JSON) uses, for its checkpoints.

        A run uses the plugins that offer its components and those that listen to events. `check_record` reads this.
        """
        names, record = _types(parameters), []
        for plugin in self.plugins:
            components = [
                f"{offer.kind}/{offer.name}"
                for offer in self.components()
                if offer.module == plugin.name and offer.name in names
            ]
            events = [event for event, listeners in self.hook.listeners.items() if plugin.name in dict(listeners)]
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
                    }
                )
        return record

    def check_record(
        self, record: Iterable[Mapping[str, Any]], parameters: Mapping[str, Any], *, events: bool = True
    ) -> RecordCheck:
        """Which plugins of `record` are missing here, and which are other code than they were.

        Only plugins that a run with these `parameters` (their JSON) uses count; with `events` false, only those that
        offer its components. A component that another plugin offers now is not missing.
        """
        names, check = _types(parameters), RecordCheck([], [])
        here = {plugin.name: plugin for plugin in self.plugins}
        for then in record:
            used = [each for each in then["components"] if each.partition("/")[2] in names]
            # records written before "events" existed name every installed plugin
            listened = events and bool(then.get("events", not then["components"]))
            if not (used or listened):
                continue
            origin = f"{then['distribution']} {then['version']}" if then["distribution"] else "--plugin"
            which = f"plugin {then['name']} ({origin}: {', '.join(used) or 'events only'})"
            now = here.get(then["name"])
            if now is None:
                offers = [self.offers.get((kind, name)) for kind, _, name in (each.partition("/") for each in used)]
                others = sorted({offer.module for offer in offers if offer is not None})
                if None in offers or listened:
                    reason = next((f"; {broken.error}" for broken in self.broken if broken.name == then["name"]), "")
                    check.missing.append(f"{which} is missing{reason}")
                else:
                    check.changed.append(f"{which} is missing; what it offered comes from {', '.join(others)}")
            elif now.sha256() != then["sha256"]:
                before, after = then["version"], now.source.version
                check.changed.append(
                    f"{which} has changed ({f'{before} -> {after}' if after != before else 'same version'})"
                )
        return check


def _types(settings: Any) -> set[str]:
    """The names of all components in the JSON `settings`: every "type", at any depth."""
    if isinstance(settings, Mapping):
        own = {settings["type"]} if isinstance(settings.get("type"), str) else set()
        return own.union(*(_types(value) for value in settings.values()))
    if isinstance(settings, Sequence) and not isinstance(settings, str):
        return set().union(*(_types(value) for value in settings))
    return set()


_loaded: dict[tuple[tuple[str, ...], tuple[str, ...]], Registry] = {}
_current: Registry | None = None


def registry() -> Registry:
    """The plugins of this process: those loaded last, else the installed ones and what the environment asks for."""
    return _current if _current is not None else load()


def load(plugins: Sequence[str] = (), without: Sequence[str] = ()) -> Registry:
    """Loads the installed plugins and `plugins` (files or module names), leaving out what `without` names.

    What `TERAKOYA_PLUGINS` and `TERAKOYA_WITHOUT` name is added, and both variables are set, so that processes started
    from this one load the same. UserError for a plugin asked for that does not load, a hook that does not exist, a name
    offered twice; an installed plugin that does not load is reported and skipped.
    """
    global _current
    asked = _merged(PLUGINS_VARIABLE, [str(Path(each).resolve()) if Path(each).exists() else each for each in plugins])
    left_out = _merged(WITHOUT_VARIABLE, without)
    key = asked, left_out
    if key not in _loaded:
        _loaded[key] = _load(*key)
        for broken in _loaded[key].broken:
            logger.warning("%s; skipped", broken)
        for leaving in _loaded[key].leaving:
            logger.warning("%s", leaving)
    for variable, values in ((PLUGINS_VARIABLE, asked), (WITHOUT_VARIABLE, left_out)):
        if values:
            os.environ[variable] = os.pathsep.join(values)
    _current = _loaded[key]
    return _current


def _merged(variable: str, values: Iterable[str]) -> tuple[str, ...]:
    """What the environment names, then `values`, each once."""
    inherited = [each for each in os.environ.get(variable, "").split(os.pathsep) if each]
    return tuple(dict.fromkeys([*inherited, *values]))


def _load(asked: Sequence[str], without: Sequence[str]) -> Registry:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    if os.environ.get(TRACE_VARIABLE, "") not in ("", "0"):
        manager.trace.root.setwriter(lambda text: logger.info("%s", text.rstrip()))
        manager.enable_tracing()
    finder = Finder(without)
    plugins: dict[str, Plugin] = {}
    leaving: list[LeavingHook] = []
    fruitful: set[Source] = set()
    for plugin in [*finder.installed(), *(each for name in asked for each in finder.asked_for(name))]:
        if plugin.module.__name__ in plugins:
            fruitful.add(plugin.source)
        elif _has_hooks(manager, plugin):
            fruitful.add(plugin.source)
            for other in plugins.values():
                if other.name == plugin.name:
                    raise UserError(f"two plugins are called {plugin.name}: {other.source} and {plugin.source}")
            plugins[plugin.module.__name__] = plugin
            leaving += _register(manager, plugin)
    fruitful |= {broken.source for broken in finder.broken}
    for source in finder.sources:
        if source not in fruitful:
            text = "has no hook; mark its functions with @hookimpl (see terakoya.hookspecs)"
            if source.asked_for:
                raise UserError(f"{source}: {text}")
            finder.broken.append(Broken(source.name, source, text))
    for name in without:
        if name not in finder.met and name != THIRD_PARTY:
            raise UserError(f"--without {name}: there is no such plugin{nearest(name, finder.met)}")

    offers: dict[tuple[str, str], Offer] = {}
    broken = list(finder.broken)
    for kind, hook in NOUNS.items():
        for name, listener in _listeners(manager, hook, plugins.values()):
            plugin = next(each for each in plugins.values() if each.name == name)
            try:
                results = call(((name, listener),))[0][1]
            except PluginError as error:
                if plugin.source.asked_for:
                    raise
                broken.append(Broken(name, plugin.source, f"{hook}: {error.message}"))
                continue
            for result in results:
                _add(offers, kind, result, plugin)
    events = Events({event: _listeners(manager, event, plugins.values()) for event in EVENTS})
    return Registry(list(plugins.values()), offers, broken, finder.blocked, events, leaving)


def _has_hooks(manager: pluggy.PluginManager, plugin: Plugin) -> bool:
    """Whether the module implements a hook. UserError for one that does not exist or was not marked."""
    specs = {
        name for name, hook in vars(manager.hook).items() if isinstance(hook, pluggy.HookCaller) and hook.has_spec()
    }
    found = False
    for name, value in list(vars(plugin.module).items()):
        options = manager.parse_hookimpl_opts(plugin.module, name)
        if options is not None:
            found = True
            if (options.get("specname") or name) not in specs:
                raise UserError(
                    f"plugin {plugin.name} ({plugin.source}): there is no hook "
                    f"{options.get('specname') or name}{nearest(name, specs)} "
                    f"Start without it: --without {plugin.name}"
                )
        elif name in NOUNS.values() and inspect.isfunction(value):
            raise UserError(f"plugin {plugin.name} ({plugin.source}): {name} is not marked with @hookimpl")
    return found


def _register(manager: pluggy.PluginManager, plugin: Plugin) -> list[LeavingHook]:
    """Registers `plugin`; returns what it implements that goes in the next release. UserError for a wrong argument."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Leaving)  # told below, with the plugin's name
            manager.register(plugin.module, name=plugin.name)
    except pluggy.PluginValidationError as error:
        text = " ".join(str(error).split())
        raise UserError(f"plugin {plugin.name} ({plugin.source}): {text}; see terakoya.hookspecs") from error
    callers = manager.get_hookcallers(plugin.module) or []
    warned = [(caller.name, caller.spec.warn_on_impl) for caller in callers if caller.spec is not None]
    return [
        LeavingHook(plugin.name, str(plugin.source), f"hook {name} {warning}")
        for name, warning in warned
        if isinstance(warning, Leaving)
    ]


def _listeners(manager: pluggy.PluginManager, hook: str, plugins: Iterable[Plugin]) -> Listeners:
    """For each plugin that implements `hook` its name and a caller of its implementation alone."""
    modules = [plugin.module for plugin in plugins]
    implementers = {implementation.plugin_name for implementation in getattr(manager.hook, hook).get_hookimpls()}
    return tuple(
        (plugin.name, manager.subset_hook_caller(hook, [module for module in modules if module is not plugin.module]))
        for plugin in plugins
        if plugin.name in implementers
    )


def _add(offers: dict[tuple[str, str], Offer], kind: str, result: Any, plugin: Plugin) -> None:
    """Adds one plugin's components. UserError for what is no component of `kind` or is there already."""
    where = f"plugin {plugin.name} ({plugin.source}): register_{kind}"
    if not isinstance(result, Mapping):
        raise UserError(f"{where}: expected a mapping of name to class, got {type(result).__name__}")
    for name, component in result.items():
        if not (isinstance(component, type) and issubclass(component, KINDS[kind])):
            raise UserError(f'{where}: "{name}": expected a subclass of {KINDS[kind].__name__}, got {component!r}')
        source = plugin.source
        new = Offer(kind, name, component, plugin.name, source.distribution or str(source), source.version)
        old = offers.get((kind, name))
        if old is not None:
            raise UserError(
                f'{kind.removesuffix("s")} "{name}" is offered twice: by {old.module} ({old.distribution}) and by '
                f"{new.module} ({new.distribution}); leave one out with --without {new.module}"
            )
        offers[kind, name] = new
