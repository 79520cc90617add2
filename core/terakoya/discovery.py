"""Finding plugin modules: through installed distributions, files and module names.

A module is one plugin; a package is every module in it, at any depth, except those whose name starts with "_".
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from terakoya.errors import UserError

GROUP = "terakoya"
"""The entry-point group, and the distribution whose plugins are the bundled ones."""

THIRD_PARTY = "third-party"
"""Given to `--without`: every installed plugin that does not come with terakoya."""


class PluginError(UserError):
    """A plugin failed: while it was imported, registered or called.

    Attributes:
        plugin: the plugin's name.
        message: what happened, with the place in the plugin's own code.
    """

    def __init__(self, plugin: str, message: str) -> None:
        super().__init__(plugin, message)
        self.plugin = plugin
        self.message = message

    def __str__(self) -> str:
        return f"plugin {self.plugin}: {self.message}"


def describe(error: BaseException) -> str:
    """The error in one line: its type, its message, and where in the code it was raised."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


@dataclass(frozen=True)
class Source:
    """Where a plugin came from: an entry point of a distribution, or `--plugin`."""

    name: str
    distribution: str | None = None
    version: str | None = None
    asked_for: bool = False

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
        """The hash of the module's file, None if it has none."""
        file = getattr(self.module, "__file__", None)
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


@dataclass(frozen=True)
class Broken:
    """A plugin that could not be loaded."""

    name: str
    source: Source
    error: str

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.source}): {self.error}"


class Finder:
    """Imports plugin modules, skips those that `without` names, collects those that fail."""

    def __init__(self, without: Sequence[str]) -> None:
        self.without = set(without)
        self.met: set[str] = set()
        """Every name that `--without` could have named."""
        self.blocked: list[str] = []
        self.broken: list[Broken] = []

    def installed(self) -> Iterator[Plugin]:
        """Every plugin of every installed distribution, the bundled ones among them."""
        for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
            dist = entry.dist
            source = Source(entry.name, dist.name if dist else None, dist.version if dist else None)
            names = {entry.name, entry.value, *([source.distribution] if source.distribution else [])}
            foreign = source.distribution != GROUP
            self.met |= names
            if self.without & names or (foreign and THIRD_PARTY in self.without):
                self.blocked.append(entry.value)
                continue
            yield from self._walk(entry.value, source)

    def asked_for(self, name: str) -> Iterator[Plugin]:
        """The plugins of a file, a folder that is a package, or a module's dotted name. UserError if there is none."""
        source = Source(name, asked_for=True)
        path = Path(name)
        if path.suffix == ".py" or path.is_dir() or "/" in name:
            yield from self._walk(self._name_of_file(path), source)
        else:
            sys.path.insert(0, str(Path.cwd()))  # `python -m` would find modules of the working directory too
            try:
                yield from self._walk(name, source)
            finally:
                sys.path.remove(str(Path.cwd()))

    def _name_of_file(self, path: Path) -> str:
        """Imports the plugin file or package folder at `path`; returns its module's name."""
        file = (path / "__init__.py" if path.is_dir() else path).resolve()
        if not file.is_file():
            raise UserError(
                f"--plugin {path}: expected a Python file, a package's folder or a module's name; not found"
            )
        name = f"terakoya_plugin_{path.resolve().stem}"
        known = sys.modules.get(name)
        if known is not None and Path(str(known.__file__)) != file:
            raise UserError(f"--plugin {path}: another plugin file bears the same name: {known.__file__}; rename one")
        if known is None:
            folders = [str(file.parent)] if path.is_dir() else None
            spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except (Exception, SystemExit) as error:
                del sys.modules[name]
                raise PluginError(str(path), describe(error)) from error
        return name

    def _walk(self, name: str, source: Source) -> Iterator[Plugin]:
        """The module `name` and, if it is a package, every module in it."""
        self.met |= {name, name.rpartition(".")[2], name.removeprefix("terakoya_plugin_")}
        if self.without & {name, name.rpartition(".")[2], name.removeprefix("terakoya_plugin_")}:
            self.blocked.append(name)
            return
        try:
            module = _import(name)
        except PluginError as error:
            if source.asked_for:
                raise
            self.broken.append(Broken(name, source, error.message))
            return
        yield Plugin(name.removeprefix("terakoya_plugin_"), module, source)
        for found in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda found: found.name):
            if not found.name.startswith("_"):
                yield from self._walk(f"{name}.{found.name}", source)


def _import(name: str) -> ModuleType:
    """The module `name`. Whatever it raises becomes a PluginError."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PluginError(name, describe(error)) from error
