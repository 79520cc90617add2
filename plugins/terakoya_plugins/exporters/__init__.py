"""Formats that finished models are written in: one file each."""
