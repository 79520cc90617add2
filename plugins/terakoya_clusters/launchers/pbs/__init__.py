"""Launcher for PBS: a job that saves before its time limit and submits the next one."""
