"""A model is tried on tensors without data before a start, and its errors are explained."""
