"""What a model or a run has learned, in numbers: loss, perplexity, the losses of its objective."""
