"""Checkpoints: whole or not there, and independent of who wrote them."""
