"""The verb of this family."""
