"""Training objectives: one file or folder each."""
