"""The parameter JSON: its keys, their checks and its JSON Schema."""
