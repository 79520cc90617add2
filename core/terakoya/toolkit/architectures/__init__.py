"""Bases for model families, and attention that keeps documents apart."""
