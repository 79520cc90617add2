"""`terakoya store` and its verbs."""
