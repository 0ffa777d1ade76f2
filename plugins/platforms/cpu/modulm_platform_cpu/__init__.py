"""Processors as a platform for modulm."""
