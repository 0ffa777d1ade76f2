"""Attention with Pallas kernels for modulm."""
