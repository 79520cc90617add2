"""For initializers: the texts that pieces of different tokenizers stand for, and how a tokenizer divides them."""
