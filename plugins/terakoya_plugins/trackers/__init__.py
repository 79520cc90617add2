"""Trackers: services and files that show the metrics of a run, one module each."""
