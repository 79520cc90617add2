"""The verb `terakoya evaluate`."""
