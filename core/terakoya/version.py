"""The version of terakoya."""

__version__ = "0.1.0"
