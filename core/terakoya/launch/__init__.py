"""Ways to start a run: here, in several processes, through a launcher."""
