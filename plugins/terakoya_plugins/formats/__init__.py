"""Checkpoint formats, a file or a folder each: importers and exporters of one program together."""
