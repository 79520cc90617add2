"""The verbs `terakoya fork` and `terakoya average`."""
