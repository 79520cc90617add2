"""The verbs `terakoya run` and `terakoya demo`."""
