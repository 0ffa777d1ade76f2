"""Granite 3 and 4 for modulm."""
