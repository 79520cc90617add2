"""From a store to the rows a model reads: packing, order, blends; nothing in here needs torch."""
