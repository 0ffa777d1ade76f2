"""Paged attention on CPUs for modulm, with compiled kernels."""
