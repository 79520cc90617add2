"""Stores that datatrove prepares, on a cluster or on this machine."""
