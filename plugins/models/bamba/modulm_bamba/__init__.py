"""Bamba for modulm."""
