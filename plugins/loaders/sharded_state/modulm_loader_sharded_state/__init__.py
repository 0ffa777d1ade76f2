"""Checkpoints with separate files for each rank."""
