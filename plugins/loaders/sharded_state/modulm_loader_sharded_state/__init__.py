"""Checkpoints of which each rank reads a file of its own."""
