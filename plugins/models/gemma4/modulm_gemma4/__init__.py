"""Gemma 4 for modulm."""
