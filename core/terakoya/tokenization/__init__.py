"""Trains tokenizers of any kind, recognises the kind of a folder, and reports on tokenizers."""
