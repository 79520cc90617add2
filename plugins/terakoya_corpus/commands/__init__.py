"""The verbs `terakoya corpus report` and `terakoya tokenizer count`."""
