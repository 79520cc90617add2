"""Models from other programs' weights, and Transformers folders."""
