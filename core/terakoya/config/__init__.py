"""The parameter JSON: its keys, their checks, its schema."""
