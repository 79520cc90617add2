"""Shared parts of launchers: their scripts, and records of submitted jobs."""
