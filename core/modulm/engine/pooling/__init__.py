"""Vectors, classes and scores instead of tokens."""
