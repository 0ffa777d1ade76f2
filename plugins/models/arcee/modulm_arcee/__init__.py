"""Arcee AFM for modulm."""
