"""The verbs `terakoya init` and `terakoya estimate`, and the option `--dry-run` of `train`."""
