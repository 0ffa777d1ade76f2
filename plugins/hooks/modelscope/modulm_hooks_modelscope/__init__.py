"""Checkpoints from ModelScope."""
