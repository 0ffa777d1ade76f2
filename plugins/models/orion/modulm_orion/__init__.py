"""Orion for modulm."""
