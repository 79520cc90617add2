"""The verbs of the family."""
