"""Event plugins: what happens next to training, one module each."""
