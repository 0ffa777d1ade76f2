"""ERNIE 4.5 for modulm."""
