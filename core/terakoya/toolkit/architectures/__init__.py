"""Attention that keeps documents apart, and what encoders and decoders have in common."""
