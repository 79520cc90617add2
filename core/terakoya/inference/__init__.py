"""Finished models in use: loading, filling masks, generation."""
