"""The verb `terakoya try`."""
