"""Event plugins: what happens beside training, one module each."""
