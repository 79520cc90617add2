"""The verb `terakoya fork`."""
