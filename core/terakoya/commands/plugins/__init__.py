"""`terakoya plugins` and its verbs."""
