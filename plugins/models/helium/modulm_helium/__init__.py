"""Helium for modulm."""
