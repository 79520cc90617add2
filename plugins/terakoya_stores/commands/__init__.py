"""The verbs `terakoya store sample`, `store merge` and `store split`."""
