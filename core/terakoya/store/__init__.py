"""The token store: its format, reading, writing, merging, splitting and checking it; nothing here needs torch."""
