"""Kimi Linear for modulm."""
