"""Launcher for Slurm: one batch script, whose job saves before its time is over and queues itself again."""

from terakoya_plugins.launchers.slurm.launcher import Slurm as Slurm
from terakoya_plugins.launchers.slurm.launcher import register_launchers as register_launchers
