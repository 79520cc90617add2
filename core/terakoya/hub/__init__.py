"""Publishes models on the Hugging Face Hub."""
