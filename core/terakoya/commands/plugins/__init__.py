"""`terakoya plugins` and its subcommands."""
