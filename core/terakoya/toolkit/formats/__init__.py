"""Building models from weights of other programs, reading their files, writing Transformers folders."""
