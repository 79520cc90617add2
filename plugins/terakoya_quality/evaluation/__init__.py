"""Evaluates finished models: loss and perplexity on texts and stores, with the measure that fits the kind of model."""
