"""The token store: its format, reading, writing, merging, checking; nothing in here needs torch."""
