"""Attention over paged memory on CPUs for modulm, by its compiled kernels."""
