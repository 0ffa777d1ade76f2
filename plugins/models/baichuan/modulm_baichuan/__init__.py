"""Baichuan for modulm."""
