"""Layouts of a run over many devices: which fit, and how fast each would be."""
