"""Checkpoints to finished models, and other programs' checkpoints to ours."""
