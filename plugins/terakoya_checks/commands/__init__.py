"""The verbs `terakoya doctor`, `terakoya verify` and `terakoya store verify`."""
