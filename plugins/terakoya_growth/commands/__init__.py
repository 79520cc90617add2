"""The verb `terakoya tokenizer extend`."""
