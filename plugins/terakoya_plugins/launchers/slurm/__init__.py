"""Launcher for Slurm: one batch script, whose job saves before its time limit and requeues itself."""

from terakoya_plugins.launchers.slurm.launcher import Slurm as Slurm
from terakoya_plugins.launchers.slurm.launcher import register_launchers as register_launchers
