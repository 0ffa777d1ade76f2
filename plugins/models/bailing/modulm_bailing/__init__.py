"""Ling and Ring for modulm."""
