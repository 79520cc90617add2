"""`terakoya launch` and its verbs for submitted jobs."""
