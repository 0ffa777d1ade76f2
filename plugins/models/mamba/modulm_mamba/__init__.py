"""Mamba 1 and 2."""
