"""What helps on the way: the next command, an example of each, what to give instead of an unknown option, tables."""
