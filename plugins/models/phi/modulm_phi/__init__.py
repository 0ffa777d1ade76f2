"""Phi 1, 1.5, 2, 3 and 4 for modulm."""
