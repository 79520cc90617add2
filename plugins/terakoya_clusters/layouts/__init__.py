"""Layouts of a run over many devices: which of them fit into memory, and how fast each would be."""
