"""Triton kernels of the bf16 stream, each of which does in one pass what takes torch several."""
