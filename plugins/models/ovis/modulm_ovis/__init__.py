"""Ovis 2 for modulm."""
