"""`terakoya store` and its subcommands."""
