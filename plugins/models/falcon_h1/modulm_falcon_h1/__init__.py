"""Falcon-H1 for modulm."""
