"""Launcher for Grid Engine (SGE, UGE, AGE): a job that saves before its time limit and submits the next one."""

from terakoya_plugins.launchers.grid_engine.launcher import GridEngine as GridEngine
from terakoya_plugins.launchers.grid_engine.launcher import register_launchers as register_launchers
