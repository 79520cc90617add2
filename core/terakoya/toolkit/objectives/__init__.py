"""Masking, losses, and the shared parts of causal objectives."""
