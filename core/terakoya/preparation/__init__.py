"""From documents and a tokenizer to a token store, in parallel; nothing in here needs torch."""
