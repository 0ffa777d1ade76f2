"""Keye-VL 1 and 1.5 for modulm."""
