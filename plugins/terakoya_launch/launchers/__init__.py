"""Launchers: ways to start a run, one file or folder each."""
