"""Launcher for Slurm: one batch script, whose job saves before its time limit and requeues itself."""
