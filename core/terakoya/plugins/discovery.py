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
    """The error in one line: its type, its message, and where it was raised; rather where the plugin's own code stood
    than deep inside a library."""
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
        """The hash of the module's file and, of a package, of the files beside it that start with "_"; None if it has
        no file."""
        file = getattr(self.module, "__file__", None)
        if not file:
            return None
        content = Path(file).read_bytes()
        if hasattr(self.module, "__path__"):
            private = sorted(path for path in Path(file).parent.rglob("*.py") if path != Path(file))
            content += b"".join(path.read_bytes() for path in private)
        return hashlib.sha256(content).hexdigest()


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
        self.sources: list[Source] = []
        """Where plugins were looked for, what was left out aside."""
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
            self.sources.append(source)
            yield from self._walk(entry.value, entry.value, source)

    def asked_for(self, name: str) -> Iterator[Plugin]:
        """The plugins of a file, a folder that is a package, or a module's dotted name. UserError if there is none."""
        source = Source(name, asked_for=True)
        path = Path(name)
        if path.suffix == ".py" or path.is_dir() or "/" in name:
            if not self._blocks(path.stem):
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

    def _blocks(self, shown: str) -> bool:
        """Whether `--without` names the plugin called `shown`, by its whole name or its last word."""
        names = {shown, shown.rpartition(".")[2]}
        self.met |= names
        if self.without & names:
            self.blocked.append(shown)
        return bool(self.without & names)

    def _walk(self, module_name: str, shown: str, source: Source) -> Iterator[Plugin]:
        """The module and, if it is a package, every module in it. `shown` is the plugin's name."""
        if self._blocks(shown):
            if source in self.sources:
                self.sources.remove(source)
            return
        try:
            module = _import(module_name)
        except PluginError as error:
            if source.asked_for:
                raise
            self.broken.append(Broken(shown, source, error.message))
            return
        yield Plugin(shown, module, source)
        if _has_hooks(module):  # its modules are its own
            return
        for found in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda found: found.name):
            if not found.name.startswith("_"):
                yield from self._walk(f"{module_name}.{found.name}", f"{shown}.{found.name}", source)


def _has_hooks(module: ModuleType) -> bool:
    """Whether `module` itself implements a hook: a package that does is one plugin."""
    return any(hasattr(value, f"{GROUP}_impl") for value in vars(module).values())


def _import_file(path: Path) -> str:
    """Imports the plugin file or package folder at `path`; returns the name of its module, told by its whole path."""
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
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise PluginError(str(path), describe(error)) from error
    return name


def _import(name: str) -> ModuleType:
    """The module `name`. Whatever it raises becomes a PluginError."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PluginError(name, describe(error)) from error
