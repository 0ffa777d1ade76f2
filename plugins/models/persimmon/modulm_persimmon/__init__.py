"""Persimmon for modulm."""
