"""Ouro for modulm."""
