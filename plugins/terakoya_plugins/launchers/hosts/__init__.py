"""Launcher for hosts reached by ssh: one script a host, which starts its processes with torchrun."""

from terakoya_plugins.launchers.hosts.launcher import Hosts as Hosts
from terakoya_plugins.launchers.hosts.launcher import register_launchers as register_launchers
