"""`terakoya plugins new` and `terakoya plugins check`."""
