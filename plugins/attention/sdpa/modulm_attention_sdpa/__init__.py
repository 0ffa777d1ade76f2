"""Portable paged attention in plain torch for modulm."""
