"""Parts of tokenizers: word splitters, vocabulary training, encoders, tokenizer folders."""
