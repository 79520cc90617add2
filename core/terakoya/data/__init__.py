"""From raw files to the rows a model reads; nothing in here needs torch."""
