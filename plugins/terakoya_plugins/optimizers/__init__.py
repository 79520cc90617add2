"""Optimizers: one file or folder each."""
