"""Moondream 3 for modulm."""
