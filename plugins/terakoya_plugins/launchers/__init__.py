"""Ways to start a run elsewhere: one file each."""
