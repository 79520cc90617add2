"""Runs as their files tell of them: status, report, metrics."""
