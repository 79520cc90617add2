"""Initializers of the embeddings of new pieces: one file each."""
