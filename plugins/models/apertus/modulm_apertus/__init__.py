"""Apertus for modulm."""
