"""Falcon for modulm."""
