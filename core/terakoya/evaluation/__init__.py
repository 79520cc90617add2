"""How good a finished model is: loss and perplexity on texts and stores, by the measures that fit its kind."""
