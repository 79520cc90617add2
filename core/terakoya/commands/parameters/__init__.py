"""`terakoya tokenizer` and its verbs."""
