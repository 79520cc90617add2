"""Fine-tunes finished models on labelled examples, and measures them with the result."""
