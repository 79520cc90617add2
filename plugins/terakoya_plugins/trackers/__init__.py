"""Places where numbers are shown: one file each."""
