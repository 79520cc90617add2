"""What `terakoya plugins new` writes: for each kind a plugin called `example`, and its test (`try_...`)."""
