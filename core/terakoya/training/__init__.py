"""From rows to checkpoints: the loop, the losses, the processes."""
