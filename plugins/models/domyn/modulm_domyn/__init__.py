"""Domyn Edge for modulm."""
