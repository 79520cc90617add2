"""Training: the loop, its losses, its processes, its checkpoints. Start with `trainer.py`, then `setup.py`."""
