"""The options that cleaning adds to verbs."""
