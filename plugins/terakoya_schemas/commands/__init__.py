"""The verb `terakoya parameters schema`."""
