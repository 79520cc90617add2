"""Loading plugins: every component by kind and name, every event with its listeners.

The core knows no component by name: it calls `registry().component("architectures", "bert")`.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy
from pydantic import BaseModel

from terakoya import hookspecs
from terakoya.components import KINDS, Component, EventListener, ModuleTransform, StartModel
from terakoya.errors import UserError, nearest
from terakoya.hookspecs import DeprecatedHook
from terakoya.plugins.discovery import (
    PLUGINS_VARIABLE,
    THIRD_PARTY,
    WITHOUT_VARIABLE,
    Broken,
    Finder,
    Plugin,
    PluginError,
    Source,
    add_inherited,
    might_have,
)
from terakoya.plugins.events import EVENTS, Events, Listeners, call
from terakoya.plugins.families import missing_family

if TYPE_CHECKING:
    from terakoya.components.run import Run

logger = logging.getLogger("terakoya")

TRACE_VARIABLE = "TERAKOYA_TRACE_PLUGINS"

REGISTER_HOOKS = {kind: f"register_{kind}" for kind in KINDS}
"""Kind of component -> the hook that registers it."""

CALLED = ("run_files", "read_cleaning", "check_parts")
FURTHER = {
    "register_settings": (
        "subclass of BaseModel",
        lambda value: isinstance(value, type) and issubclass(value, BaseModel),
    ),
    "register_engines": ("function", callable),
    "register_record_formats": ("function", callable),
    "register_watches": ("function", callable),
    "register_initial_weights": ("function", callable),
    "register_module_transforms": ("ModuleTransform", lambda value: isinstance(value, ModuleTransform)),
}
"""The hooks that bring what is no component, when plugins load: what their mappings hold, in a word and as a test."""
PROGRAM = ("register_commands", "register_options", "register_languages", "register_places")
FURTHER_HOOKS = (*PROGRAM, *FURTHER, *CALLED)
"""All that bring what is no component."""


class Registration(NamedTuple):
    """A registered component and its origin."""

    kind: str
    name: str
    component: type[Component]
    module: str
    """The plugin's name: its module, or the name of its file."""
    distribution: str
    version: str | None


class DeprecatedHookUse(NamedTuple):
    """A plugin that implements a deprecated hook."""

    plugin: str
    source: str
    text: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} ({self.source}): {self.text}"


@dataclass(frozen=True)
class Registry:
    """The plugins of one process."""

    plugins: Sequence[Plugin]
    registrations: Mapping[tuple[str, str], Registration]
    broken: Sequence[Broken]
    excluded: Sequence[str]
    hook: Events
    deprecated_hooks: Sequence[DeprecatedHookUse] = ()
    settings: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Settings files that are no components, by the command and the options that read them."""
    called: Mapping[str, Listeners] = field(default_factory=dict)
    """The listeners of each of `CALLED`."""
    engines: Mapping[str, tuple[Callable[[Any], Any], Plugin]] = field(default_factory=dict)
    """What builds an engine, and the plugin that has it, by name."""
    watches: Mapping[str, tuple[Callable[..., Any], Plugin]] = field(default_factory=dict)
    """What builds a watch, and the plugin that has it: of steps by the key of the parameters, and of ranks."""
    initial_weights: Mapping[str, tuple[Callable[[StartModel], Any], Plugin]] = field(default_factory=dict)
    """What makes a folder's model fit a run, by the key of `start_from`."""
    transforms: Mapping[str, tuple[ModuleTransform, Plugin]] = field(default_factory=dict)
    """Transforms of a run's module, and the plugin that has each, by name."""
    record_formats: Mapping[str, tuple[Callable[..., Any], Plugin]] = field(default_factory=dict)
    """What makes a record format, and the plugin that has it, by name."""

    def start_listeners(self, run: Run) -> dict[str, EventListener]:
        """Returns the listeners of the event plugins of `run`, by name: those that its parameters name, and those that
        every run has. Raises UserError if a plugin does not start."""
        chosen = dict(run.parameters.events)
        for name in self.names("events"):
            if self.component("events", name).always:
                chosen.setdefault(name, self.component("events", name)())
        return {name: plugin.start(run) for name, plugin in sorted(chosen.items()) if plugin is not None}

    def component(self, kind: str, name: str) -> type[Any]:
        """Returns the class registered as `name` among `kind` (a key of `components.KINDS`). Raises UserError if there
        is none."""
        registration = self.registrations.get((kind, name))
        if registration is not None:
            return registration.component
        assert kind in KINDS, kind
        family = missing_family("components", f"{kind} {name}")
        message = f"{kind.removesuffix('s')} {name}: not installed{family or nearest(name, self.names(kind))}"
        by_origin: dict[str, list[str]] = {}
        for other in self.components():
            if other.kind == kind:
                by_origin.setdefault(f"{other.distribution} {other.version or ''}".strip(), []).append(other.name)
        for origin, names in by_origin.items():
            line = f"installed with {origin}: {', '.join(names)}"
            message += f"\n  {line}"
        raise UserError(message + might_have(self.broken, self.excluded))

    def missing(self, what: str, name: str) -> str:
        """Returns where `name` might be that no plugin has among `what` (a field of `Family`), as the end of a
        sentence."""
        return missing_family(what, name) + might_have(self.broken, self.excluded)

    def record_format(self, name: str) -> Callable[..., Any]:
        """Returns what makes the record format `name`. Raises UserError if no plugin has it."""
        if name not in self.record_formats:
            raise UserError(f"--{name}: no plugin reads them{self.missing('record_formats', name)}")
        return self.record_formats[name][0]

    def names(self, kind: str) -> list[str]:
        """Returns the names registered among `kind`, sorted."""
        return sorted(name for registered_kind, name in self.registrations if registered_kind == kind)

    def name_of(self, kind: str, component: type[Component]) -> str:
        """Returns the name under which `component` is registered among `kind`. Raises UserError if it is not."""
        of_kind = ((name, each.component) for (its, name), each in self.registrations.items() if its == kind)
        if found := [name for name, registered in of_kind if registered is component]:
            return min(found)
        raise UserError(f"{kind.removesuffix('s')} {component.__name__}: not registered; known: {self.names(kind)}")

    def components(self) -> list[Registration]:
        """Returns all registered components, sorted by kind and name."""
        kinds = list(KINDS)
        return sorted(self.registrations.values(), key=lambda component: (kinds.index(component.kind), component.name))


class Manager(pluggy.PluginManager):
    """pluggy's, without a long look at each name of a module that no `@hookimpl` marks."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Returns the options of the hook `name` of `plugin`, None where it is no hook."""
        if isinstance(plugin, ModuleType) and not hasattr(vars(plugin).get(name), f"{self.project_name}_impl"):
            return None
        return super().parse_hookimpl_opts(plugin, name)


_registries: dict[tuple[tuple[str, ...], tuple[str, ...]], Registry] = {}
_current: Registry | None = None


def registry() -> Registry:
    """Returns the plugins of this process: those loaded last, else the installed ones and those that the environment
    names."""
    return _current if _current is not None else load()


def load(plugins: Sequence[str] = (), without: Sequence[str] = ()) -> Registry:
    """Loads the installed plugins and `plugins` (files or module names), except those that `without` names. Raises
    UserError if a requested plugin does not load, a hook does not exist, or a name is registered twice.

    The names in `TERAKOYA_PLUGINS` and `TERAKOYA_WITHOUT` are added, and both variables are set, so that processes
    started from this one load the same plugins. An installed plugin that does not load is reported and skipped.
    """
    global _current
    requested = add_inherited(PLUGINS_VARIABLE, plugins)
    excluded = add_inherited(WITHOUT_VARIABLE, without)
    key = requested, excluded
    if key not in _registries:
        _registries[key] = _load(*key)
        for broken in _registries[key].broken:
            logger.warning("%s; skipped", broken)
        for use in _registries[key].deprecated_hooks:
            logger.warning("%s", use)
    for variable, values in ((PLUGINS_VARIABLE, requested), (WITHOUT_VARIABLE, excluded)):
        if values:
            os.environ[variable] = os.pathsep.join(values)
    _current = _registries[key]
    return _current


@contextmanager
def listening(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While the block runs, the events of runs in this process also call `functions`, by event. Raises UserError as
    `Events.with_functions`."""
    global _current
    before = registry()
    _current = replace(before, hook=before.hook.with_functions(functions))
    try:
        yield
    finally:
        _current = before


def _load(requested: Sequence[str], without: Sequence[str]) -> Registry:
    manager = Manager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    if os.environ.get(TRACE_VARIABLE, "") not in ("", "0"):
        manager.trace.root.setwriter(lambda text: logger.info("%s", text.rstrip()))
        manager.enable_tracing()
    finder = Finder(without)
    plugins: dict[str, Plugin] = {}
    deprecated: list[DeprecatedHookUse] = []
    with_hooks: set[Source] = set()
    for plugin in [*finder.find_installed(), *(plugin for name in requested for plugin in finder.find_requested(name))]:
        if plugin.module.__name__ in plugins:
            with_hooks.add(plugin.source)
        elif _has_hooks(manager, plugin):
            with_hooks.add(plugin.source)
            for other in plugins.values():
                if other.name == plugin.name:
                    raise UserError(f"two plugins are called {plugin.name}: {other.source} and {plugin.source}")
            plugins[plugin.module.__name__] = plugin
            deprecated += _register(manager, plugin)
    with_hooks |= {broken.source for broken in finder.broken}
    for source in finder.sources:
        if source not in with_hooks:
            text = "has no hook; mark its functions with @hookimpl (see terakoya.hookspecs)"
            if source.requested:
                raise UserError(f"{source}: {text}")
            finder.broken.append(Broken(source.name, source, text))
    for name in without:
        if name not in finder.seen_names and name != THIRD_PARTY:
            raise UserError(f"--without {name}: there is no such plugin{nearest(name, finder.seen_names)}")

    registrations: dict[tuple[str, str], Registration] = {}
    broken = list(finder.broken)
    further: dict[str, dict[str, tuple[Any, Plugin]]] = {hook: {} for hook in FURTHER}
    for kind, hook in {**REGISTER_HOOKS, **{hook: hook for hook in FURTHER}}.items():
        for name, listener in _listeners(manager, hook, plugins.values()):
            plugin = next(each for each in plugins.values() if each.name == name)
            try:
                results = call(((name, listener),))[0][1]
            except PluginError as error:
                if plugin.source.requested:
                    raise
                broken.append(Broken(name, plugin.source, f"{hook}: {error.message}"))
                continue
            for result in results:
                if hook in FURTHER:
                    _add_further(further[hook], hook, result, plugin)
                else:
                    _add(registrations, kind, result, plugin)
    events = Events({event: _listeners(manager, event, plugins.values()) for event in EVENTS})
    called = {hook: _listeners(manager, hook, plugins.values()) for hook in CALLED}
    models = {words: model for words, (model, _) in further["register_settings"].items()}
    return Registry(
        list(plugins.values()), registrations, broken, finder.excluded, events, deprecated, models, called,
        engines=further["register_engines"], record_formats=further["register_record_formats"],
        initial_weights=further["register_initial_weights"], transforms=further["register_module_transforms"],
        watches=further["register_watches"],
    )  # fmt: skip


def _has_hooks(manager: pluggy.PluginManager, plugin: Plugin) -> bool:
    """Returns whether the module implements a hook. Raises UserError for a hook that does not exist or is not
    marked."""
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
        elif inspect.isfunction(value) and name in (*REGISTER_HOOKS.values(), *FURTHER_HOOKS):
            raise UserError(f"plugin {plugin.name} ({plugin.source}): {name} is not marked with @hookimpl")
    return found


def _register(manager: pluggy.PluginManager, plugin: Plugin) -> list[DeprecatedHookUse]:
    """Registers `plugin`; returns its deprecated hooks. Raises UserError for a hook with a wrong argument."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecatedHook)  # `load` warns, with the plugin's name
            manager.register(plugin.module, name=plugin.name)
    except pluggy.PluginValidationError as error:
        text = " ".join(str(error).split())
        raise UserError(f"plugin {plugin.name} ({plugin.source}): {text}; see terakoya.hookspecs") from error
    callers = manager.get_hookcallers(plugin.module) or []
    warned = [(caller.name, caller.spec.warn_on_impl) for caller in callers if caller.spec is not None]
    return [
        DeprecatedHookUse(plugin.name, str(plugin.source), f"hook {name} {warning}")
        for name, warning in warned
        if isinstance(warning, DeprecatedHook)
    ]


def _listeners(manager: pluggy.PluginManager, hook: str, plugins: Iterable[Plugin]) -> Listeners:
    """Returns, for each plugin that implements `hook`, its name and a function that calls its implementation only."""
    modules = [plugin.module for plugin in plugins]
    implementers = {implementation.plugin_name for implementation in getattr(manager.hook, hook).get_hookimpls()}
    return tuple(
        (plugin.name, manager.subset_hook_caller(hook, [module for module in modules if module is not plugin.module]))
        for plugin in plugins
        if plugin.name in implementers
    )


def _add_further(found: dict[str, tuple[Any, Plugin]], hook: str, result: Any, plugin: Plugin) -> None:
    """Adds what one plugin returns of a hook among `FURTHER`. Raises UserError for what is none, and for one that is
    there already."""
    where = f"plugin {plugin.name} ({plugin.source}): {hook}"
    kind, is_one = FURTHER[hook]
    if not isinstance(result, Mapping):
        raise UserError(f"{where}: expected a mapping of name to {kind}, got {type(result).__name__}")
    for name, value in result.items():
        if not is_one(value):
            raise UserError(f'{where}: "{name}": expected a {kind}, got {value!r}')
        if name in found:
            raise UserError(f'{where}: "{name}" is registered twice')
        found[name] = value, plugin


def _add(registrations: dict[tuple[str, str], Registration], kind: str, result: Any, plugin: Plugin) -> None:
    """Adds one plugin's components. Raises UserError for a class that is not of `kind` or a name that is taken."""
    where = f"plugin {plugin.name} ({plugin.source}): register_{kind}"
    if not isinstance(result, Mapping):
        raise UserError(f"{where}: expected a mapping of name to class, got {type(result).__name__}")
    for name, component in result.items():
        if not (isinstance(component, type) and issubclass(component, KINDS[kind])):
            raise UserError(f'{where}: "{name}": expected a subclass of {KINDS[kind].__name__}, got {component!r}')
        source = plugin.source
        new = Registration(kind, name, component, plugin.name, source.distribution or str(source), source.version)
        old = registrations.get((kind, name))
        if old is not None:
            raise UserError(
                f'{kind.removesuffix("s")} "{name}" is registered twice: by {old.module} ({old.distribution}) and by '
                f"{new.module} ({new.distribution}); exclude one with --without {new.module}"
            )
        registrations[kind, name] = new
