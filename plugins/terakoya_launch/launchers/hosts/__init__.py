"""Launcher for hosts reached by ssh: one script a host, which starts its processes with torchrun."""
