"""Ways to start a run: in this process, in several local processes, through a launcher."""
