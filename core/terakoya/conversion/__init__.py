"""Converts checkpoints to finished models, and other programs' checkpoints to Transformers folders."""
