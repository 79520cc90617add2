"""Reads a token store as rows: packing, order, mixtures of stores. A row is one training sequence; `batch_size` counts
rows. Nothing here imports torch."""
