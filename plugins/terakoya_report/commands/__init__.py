"""The verb `terakoya report`."""
