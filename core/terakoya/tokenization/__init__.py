"""Tokenizers as the core handles them: trained, recognised, compared."""
