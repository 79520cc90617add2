"""What is learnt: one file each."""
