"""LFM2 for modulm."""
