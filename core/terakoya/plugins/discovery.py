"""Finding plugin modules: through installed distributions, files and module names.

A module is one plugin. A package that has a hook itself is one plugin, too; of another package every module is one, at
any depth, except those whose name starts with "_".
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from terakoya.errors import UserError
from terakoya.plugins.families import missing_needs

GROUP = "terakoya"
"""The entry-point group, and the distribution of the bundled plugins."""

PLUGINS_VARIABLE = "TERAKOYA_PLUGINS"
WITHOUT_VARIABLE = "TERAKOYA_WITHOUT"

THIRD_PARTY = "third-party"
"""The value of `--without` that excludes every installed plugin that is not bundled with terakoya."""


class PluginError(UserError):
    """A plugin failed: while it was imported, registered or called.

    Attributes:
        plugin: the plugin's name.
        message: what happened, with the place in the plugin's own code.
        without: the option of terakoya that starts it without the plugin; "" where that would be no help.
    """

    def __init__(self, plugin: str, message: str, without: str = "") -> None:
        super().__init__(plugin, message, without)
        self.plugin = plugin
        self.message = message
        self.without = without

    def __str__(self) -> str:
        text = f"plugin {self.plugin}: {self.message}"
        return f"{text}. Start without it: {self.without}" if self.without else text


def describe(error: BaseException) -> str:
    """Returns the error in one line: its type, its message, and the place where it was raised, preferably in the
    plugin's own code and not deep inside a library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    own = [frame for frame in frames if not _is_library(Path(frame.filename))]
    place = f" ({(own or frames)[-1].filename}:{(own or frames)[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _is_library(file: Path) -> bool:
    return Path(__file__).parents[1] in file.parents or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


@dataclass(frozen=True)
class Source:
    """The origin of a plugin: an entry point of a distribution, or `--plugin` (then `requested` is True)."""

    name: str
    distribution: str | None = None
    version: str | None = None
    requested: bool = False

    def __str__(self) -> str:
        if self.distribution:
            return f"{self.distribution} {self.version}"
        return f"--plugin {self.name}"


@dataclass(frozen=True)
class Plugin:
    """One imported plugin module."""

    name: str
    module: ModuleType
    source: Source

    def sha256(self) -> str | None:
        """Returns the hash of the module's file and, for a package, of all other files in it; None if there is no
        file."""
        file = getattr(self.module, "__file__", None)
        if not file:
            return None
        content = Path(file).read_bytes()
        if hasattr(self.module, "__path__"):
            others = sorted(path for path in Path(file).parent.rglob("*.py") if path != Path(file))
            content += b"".join(path.read_bytes() for path in others)
        return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Broken:
    """A plugin that could not be loaded."""

    name: str
    source: Source
    error: str

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.source}): {self.error}"


def add_inherited(variable: str, values: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in the environment variable, then `values`, each once; files by their whole path."""
    inherited = [name for name in os.environ.get(variable, "").split(os.pathsep) if name]
    given = [
        str(Path(name).resolve()) if variable == PLUGINS_VARIABLE and Path(name).exists() else name for name in values
    ]
    return tuple(dict.fromkeys([*inherited, *given]))


def might_have(broken: Iterable[Broken], excluded: Iterable[str]) -> str:
    """Returns a line for each plugin in which something that was not found might be."""
    lines = [f"could not be loaded and might have it: {each}" for each in broken]
    lines += [f"excluded by --without and might have it: {each}" for each in excluded]
    return "".join(f"\n  {line}" for line in lines)


class Finder:
    """Imports plugin modules, skips those that `without` names, collects those that fail; without `submodules` only
    those that entry points and `--plugin` name themselves."""

    def __init__(self, without: Sequence[str], submodules: bool = True) -> None:
        self.without = set(without)
        self.submodules = submodules
        self.seen_names: set[str] = set()
        """Every name that `--without` could have named."""
        self.sources: list[Source] = []
        """The sources that were searched, without the excluded ones."""
        self.excluded: list[str] = []
        self.broken: list[Broken] = []

    def find_installed(self) -> Iterator[Plugin]:
        """Yields every plugin of every installed distribution, including the bundled ones."""
        for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
            dist = entry.dist
            source = Source(entry.name, dist.name if dist else None, dist.version if dist else None)
            names = {entry.name, entry.value, *([source.distribution] if source.distribution else [])}
            third_party = source.distribution != GROUP
            self.seen_names |= names
            if self.without & names or (third_party and THIRD_PARTY in self.without):
                self.excluded.append(entry.value)
                continue
            if missing := [] if third_party else missing_needs(entry.name):
                error = f"needs the family {missing[0]}, which is not installed"
                self.broken.append(Broken(entry.value, source, error))
                continue
            self.sources.append(source)
            yield from self._walk(entry.value, entry.value, source)

    def find_requested(self, name: str) -> Iterator[Plugin]:
        """Yields the plugins of a file, of a folder that is a package, or of a module given by its dotted name. Raises
        UserError if there is no such file, folder or module."""
        source = Source(name, requested=True)
        path = Path(name)
        if path.suffix == ".py" or path.is_dir() or "/" in name:
            if not self._excludes(path.stem):
                self.sources.append(source)
                yield from self._walk(_import_file(path), path.stem, source)
            return
        folder = str(Path.cwd())
        sys.path.insert(0, folder)  # as `python -m` would find modules of the working directory
        try:
            self.sources.append(source)
            yield from self._walk(name, name, source)
        finally:
            sys.path.remove(folder)

    def _excludes(self, plugin_name: str) -> bool:
        """Returns whether `--without` names the plugin, by its whole name or the last part of it."""
        names = {plugin_name, plugin_name.rpartition(".")[2]}
        self.seen_names |= names
        if self.without & names:
            self.excluded.append(plugin_name)
        return bool(self.without & names)

    def _walk(self, module_name: str, plugin_name: str, source: Source) -> Iterator[Plugin]:
        """Yields the module and, if it is a package without a hook, every module in it."""
        if self._excludes(plugin_name):
            if source in self.sources:
                self.sources.remove(source)
            return
        try:
            module = _import(module_name)
        except PluginError as error:
            if source.requested:
                raise PluginError(plugin_name, error.message, f"--without {plugin_name}") from error
            self.broken.append(Broken(plugin_name, source, error.message))
            return
        yield Plugin(plugin_name, module, source)
        if has_hooks(module) or not self.submodules:  # a package with a hook is one plugin
            return
        for found in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda found: found.name):
            if not found.name.startswith("_"):
                yield from self._walk(f"{module_name}.{found.name}", f"{plugin_name}.{found.name}", source)


def has_hooks(module: ModuleType) -> bool:
    """Returns whether `module` itself implements a hook."""
    return any(hasattr(value, f"{GROUP}_impl") for value in vars(module).values())


def _import_file(path: Path) -> str:
    """Imports the plugin file or package folder at `path`; returns the module's name, which holds a hash of the whole
    path."""
    file = (path / "__init__.py" if path.is_dir() else path).resolve()
    if not file.is_file():
        raise UserError(
            f"--plugin {path}: expected a Python file, a package's folder (with __init__.py) or a module's name; "
            "not found"
        )
    name = f"terakoya_plugin_{path.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        folders = [str(file.parent)] if path.is_dir() else None
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        if spec is None or spec.loader is None:
            raise UserError(f"--plugin {path}: expected a Python file, whose name ends in .py, got another one")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise PluginError(str(path), describe(error), f"--without {path.stem}") from error
    return name


def _import(name: str) -> ModuleType:
    """Returns the module `name`. Any exception of its code becomes a PluginError."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PluginError(name, describe(error)) from error
