"""Pipelines: one JSON from raw text to a published model."""
