"""What a machine and an installation offer to training."""
