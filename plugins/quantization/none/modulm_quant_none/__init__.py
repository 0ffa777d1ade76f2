"""Weights as they are, for modulm."""
