"""Masking, losses and what causal objectives have in common."""
