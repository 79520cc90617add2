"""What helps on the way: the next command, and an example of each."""
