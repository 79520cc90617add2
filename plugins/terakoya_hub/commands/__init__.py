"""The verb `terakoya upload`."""
