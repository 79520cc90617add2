"""Words, pieces and tokenizer folders: what tokenizers are made of."""
