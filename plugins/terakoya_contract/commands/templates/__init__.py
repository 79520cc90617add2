"""The templates of `terakoya plugins new`: for each kind a plugin called `example`, and its test (`try_...`)."""
