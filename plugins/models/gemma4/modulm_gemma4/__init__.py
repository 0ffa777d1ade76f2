"""Gemma 3n and 4 for modulm."""
