"""Estimates of a run without training: parameters, operations, memory of each rank, disk, hours."""
