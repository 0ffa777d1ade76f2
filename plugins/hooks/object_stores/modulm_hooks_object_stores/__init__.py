"""Checkpoints from object stores."""
