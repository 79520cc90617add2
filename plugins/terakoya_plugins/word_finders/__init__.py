"""Word finders, a file each: where the words of a text are, for `terakoya prepare --words`."""
