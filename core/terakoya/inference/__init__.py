"""Finds finished models and loads them, with an attention that is safe for padded rows."""
