"""Launcher for PBS: a job that saves before its time limit and submits the next one."""

from terakoya_plugins.launchers.pbs.launcher import Pbs as Pbs
from terakoya_plugins.launchers.pbs.launcher import register_launchers as register_launchers
