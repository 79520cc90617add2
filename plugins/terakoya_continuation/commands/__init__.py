"""What is added to the verb `init`."""
