"""`terakoya launch`, its verbs for submitted jobs, and `terakoya move`."""
