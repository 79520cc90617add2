"""Runs as their files describe them: status, report, metrics."""
