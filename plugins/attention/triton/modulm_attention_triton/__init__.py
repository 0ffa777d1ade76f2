"""Paged attention on GPUs for modulm, with Triton kernels."""
