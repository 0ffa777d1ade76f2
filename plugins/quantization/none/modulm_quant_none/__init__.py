"""Unquantized weights for modulm."""
