"""Publishing on the Hugging Face Hub."""
