"""Mixtral for modulm."""
