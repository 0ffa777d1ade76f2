"""Muse Glimmer for modulm."""
