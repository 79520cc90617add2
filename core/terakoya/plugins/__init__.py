"""Plugins: found, loaded, looked up by kind and name, called at a run's events."""

from terakoya.plugins.discovery import PluginError
from terakoya.plugins.loading import (
    PLUGINS_VARIABLE,
    WITHOUT_VARIABLE,
    Registration,
    Registry,
    listening,
    load,
    registry,
)

__all__ = [
    "PLUGINS_VARIABLE",
    "WITHOUT_VARIABLE",
    "PluginError",
    "Registration",
    "Registry",
    "listening",
    "load",
    "registry",
]
