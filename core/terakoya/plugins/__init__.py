"""Plugins: found, loaded, looked up by kind and name, called at a run's events.

What loads them is imported when it is first used: the command line finds its verbs without components and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from terakoya.plugins.discovery import PLUGINS_VARIABLE as PLUGINS_VARIABLE
from terakoya.plugins.discovery import WITHOUT_VARIABLE as WITHOUT_VARIABLE
from terakoya.plugins.discovery import PluginError as PluginError

if TYPE_CHECKING:
    from terakoya.plugins.loading import Registration as Registration
    from terakoya.plugins.loading import Registry as Registry
    from terakoya.plugins.loading import listening as listening
    from terakoya.plugins.loading import load as load
    from terakoya.plugins.loading import registry as registry


def __getattr__(name: str) -> Any:
    if name in ("Registration", "Registry", "listening", "load", "registry"):
        return getattr(import_module("terakoya.plugins.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
