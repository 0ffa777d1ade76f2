"""Granite 3 for modulm."""
